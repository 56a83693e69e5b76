"""The running batch of one rollout: its cache and rows, the programs that change them, their cost.

Rows that begin are written into free places (`extend`), all rows decode together, and the batch
shrinks as they finish. `all_rows` holds every row in order; a batch writes its rows back there
before their places are given away. The scheduler decides which rows begin, and when what runs.

Between two programs the host reads a few counts. Of tokens it reads the drafts and what rows hold,
to pack them.
"""

import dataclasses
import functools
import time
from typing import Any

import numpy as np

from specrl_jax import hosts
from specrl_jax.models.kv_cache import KVCache
from specrl_jax.models.transformer import Params
from specrl_jax.rollout.drafts.sources import DraftHistory
from specrl_jax.rollout.engine.all_rows import empty_batch
from specrl_jax.rollout.engine.buckets import Buckets
from specrl_jax.rollout.engine.decode import StepCounts, StopCondition, decode_steps
from specrl_jax.rollout.engine.extend import extend
from specrl_jax.rollout.engine.prefixes import Prefixes, pack_prefixes
from specrl_jax.rollout.engine.requests import DraftInputs, Requests
from specrl_jax.rollout.engine.spec import ProgramSpec
from specrl_jax.rollout.engine.stats import Stats
from specrl_jax.rollout.rows import Rows, compact, scatter


@dataclasses.dataclass
class Runner:
    """The rows of one rollout, those of them that run, and the cost so far."""

    program: ProgramSpec
    buckets: Buckets
    weights: Params
    all_rows: Rows
    requests: Requests
    drafts: DraftInputs
    stats: Stats = dataclasses.field(default_factory=Stats)

    def __post_init__(self):
        self.size = self.buckets.rows[0]  # places of the batch
        self.cache: KVCache
        self.rows: Rows
        self.cache, self.rows = empty_batch(
            self.program, self.all_rows, size=self.size, slots=self.buckets.slots
        )
        self.train = np.zeros(self.buckets.multiple, int)  # [shards], unfinished rows to train on
        self.unfinished = np.zeros(self.buckets.multiple, int)  # [shards], unfinished rows
        self.written_back = 0  # rows that began or were unfinished at the last write-back
        self.draft_state: Any = None  # of the draft source, made before the first step that drafts
        # Whether rows hold tokens that the draft source has not seen.
        self.draft_state_stale = bool(self.requests.held_lens.any())
        self.finished = self.requests.done.copy()  # kept up to date where a rollout may end early

    # Rows begin -----------------------------------------------------------------------------------

    @functools.cached_property
    def texts(self) -> np.ndarray:
        """int32 [B, P + R], on the host: each row's prompt, and after it its draft, or what it
        holds."""
        requests = self.requests
        prompts = requests.prompts
        group = self.program.group_size
        tokens = np.zeros((len(requests.done), self.program.response_slots), np.int32)
        if self.drafts.previous is not None and requests.draft_lens.any():
            tokens = hosts.fetch(self.drafts.previous.tokens)
        if requests.held_lens.any():
            held = hosts.fetch(self.all_rows.tokens)[:, : tokens.shape[1]]
            inside = np.arange(tokens.shape[1]) < requests.held_lens[:, None]
            tokens = np.where(inside, held, tokens)
        texts = np.repeat(np.pad(prompts.tokens, ((0, 0), (0, tokens.shape[1]))), group, axis=0)
        columns = np.repeat(prompts.lens, group)[:, None] + np.arange(tokens.shape[1])
        np.put_along_axis(texts, columns, tokens, axis=1)
        return texts

    def pack(self, index: list[np.ndarray], draft_ends: np.ndarray) -> Prefixes:
        """Pack rows that begin. index: int, of each shard. draft_ends: int32 [B], up to where the
        draft of each row is verified."""
        requests = self.requests
        every = np.concatenate(index)
        prompt_lens = requests.prompts.lens[every // self.program.group_size]
        lens = prompt_lens + np.maximum(requests.held_lens, draft_ends)[every]
        own = [rows % requests.shard_rows for rows in index]
        return pack_prefixes(self.buckets, self.texts[every], lens, own, draft_ends[every])

    def extend(self, prefixes: Prefixes) -> np.ndarray:
        """Let packed rows begin; returns int [2], verified and accepted tokens of drafts."""
        self.write_back_finished()
        self.written_back = self.unfinished.sum() + prefixes.first_row[:, -1].sum()
        start = time.perf_counter()
        self.cache, self.rows, counts, progress = extend(
            self.program,
            self.buckets,
            self.weights,
            self.cache,
            self.rows,
            self.all_rows,
            self.drafts.previous,
            np.float32(self.drafts.log_lenience),
            prefixes,
            self.stop_condition(),
        )
        counts = self._read(counts, progress)
        self.draft_state_stale = True
        tokens = int(prefixes.count) * prefixes.tokens[0].size
        self.stats.add_extension(tokens, *counts.tolist(), time.perf_counter() - start)
        return counts

    # Rows decode ----------------------------------------------------------------------------------

    def stop_condition(self, **bounds: Any) -> StopCondition:
        """Return the condition of `bounds`, as in `StopCondition.of`."""
        requests = self.requests
        return StopCondition.of(requests.shard_train_rows, requests.shard_rows, **bounds)

    def decode(self, stop: StopCondition, width: int) -> StepCounts:
        """Run decode steps of one width."""
        draft_state = self._synced_draft_state() if width > 1 else None
        start = time.perf_counter()
        self.cache, self.rows, draft_state, counts, progress = decode_steps(
            self.program, self.weights, self.cache, self.rows, draft_state, stop, width=width
        )
        if width > 1:
            self.draft_state = draft_state
        else:
            self.draft_state_stale = True
        counts = self._read(counts, progress)
        self.stats.add_decode(self.size, width, counts, time.perf_counter() - start)
        return counts

    def _read(self, counts: Any, progress: Any) -> Any:
        """The counts on the host, once the model has run; notes how many rows are left, and which
        are done."""
        ends_early = self.requests.stop_after_groups or self.requests.allow_unfinished
        done = (self.rows.index, self.rows.done) if ends_early else None
        counts, progress, done = hosts.fetch((counts, progress, done))
        self.train, self.unfinished = progress.T
        if done is not None:
            index, done = done
            self.finished[index[done & self.requests.trained(index)]] = True
        return counts

    def _synced_draft_state(self) -> Any:
        """The draft source's state for all that rows hold. Steps that do not draft do not write to
        it, nor is it made for them, so that they cost as little as without a draft source."""
        source = self.program.draft_source
        if source is None:
            return None
        prompts = self.requests.prompts
        if self.draft_state is None:
            history = self.drafts.history
            if history is None:
                history = DraftHistory.empty(len(prompts.lens), self.program.response_slots)
            self.draft_state = source.init(prompts, history, self.program.group_size)
        if self.draft_state_stale:
            self.write_back()
            rows = self.all_rows
            self.draft_state = source.sync(self.draft_state, rows.tokens, rows.lens)
            self.draft_state_stale = False
        return self.draft_state

    # Rows move ------------------------------------------------------------------------------------

    def compact(self, size: int) -> None:
        """Give the unfinished rows a smaller batch."""
        self.write_back_finished()
        self.cache, self.rows = compact(self.cache, self.rows, size=size)
        self.size = size

    def write_back(self) -> None:
        self.all_rows = scatter(self.rows, self.all_rows)
        self.written_back = self.unfinished.sum()

    def write_back_finished(self) -> None:
        """Write rows back that are done, before others take their places."""
        if self.unfinished.sum() < self.written_back:
            self.write_back()

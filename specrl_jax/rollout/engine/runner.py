"""Runs the model on batches of rows, moves rows between batches, and notes what it cost.

Rows that decode share one batch, `running`; beside it there may be one more whose rows begin. All
rows of the rollout are in `all_rows`, in order; a batch writes its rows back there. The scheduler
decides which rows run, in which bucket and for how long. Shards of the batch have equal parts of a
bucket, and a row stays on its shard: the fullest one needs the bucket.

Between two runs the host reads a few counts. Of tokens it reads the drafts alone, to pack them.
"""

import dataclasses
import functools
import time
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import Array

from specrl_jax import hosts
from specrl_jax.models.kv_cache import KVCache, cache_slots
from specrl_jax.models.transformer import Params
from specrl_jax.rollout.drafts.sources import DraftHistory
from specrl_jax.rollout.engine import decode, decode_state
from specrl_jax.rollout.engine.buckets import Buckets
from specrl_jax.rollout.engine.decode import StepCounts, StopCondition
from specrl_jax.rollout.engine.decode_state import DecodeState
from specrl_jax.rollout.engine.draft_tries import DraftTries
from specrl_jax.rollout.engine.requests import DraftInputs, Requests
from specrl_jax.rollout.engine.spec import ProgramSpec
from specrl_jax.rollout.engine.stats import Stats

FOREVER = np.iinfo(np.int32).max


@dataclasses.dataclass
class DecodeBatch:
    """Rows that are computed together."""

    cache: KVCache
    rows: DecodeState
    size: int  # rows, padding included
    slots: int  # of the cache
    written_back: int  # rows that were unfinished when the batch was last written back
    counts: "RowCounts | None" = None  # once they are counted
    longest: int = 0  # tokens of the longest row that is not done
    longest_draft: int = 0  # draft tokens left to verify

    @property
    def unfinished(self) -> int:
        return int(self.counts.unfinished.sum())

    @property
    def train_rows(self) -> int:
        return int(self.counts.train.sum())

    @property
    def verifying(self) -> int:
        return int(self.counts.verifying.sum())

    @property
    def shape(self) -> tuple[int, int]:
        return self.size, self.slots

    def update(self, progress: np.ndarray) -> None:
        """Take in progress as `decode.progress` reports it."""
        self.counts = RowCounts(*progress[:, :3].T)
        self.longest, self.longest_draft = progress[:, 3:].max(axis=0).tolist()

    def drop_drafts(self) -> None:
        self.rows = decode_state.without_drafts(self.rows)
        self.longest_draft = 0
        self.counts = self.counts._replace(verifying=0 * self.counts.verifying)


class RowCounts(NamedTuple):
    """Rows of a batch on each shard, int [shards]."""

    train: np.ndarray  # to train on, not done
    unfinished: np.ndarray
    verifying: np.ndarray


@dataclasses.dataclass
class ModelRunner:
    """The rows of one rollout, and its cost so far."""

    program: ProgramSpec
    buckets: Buckets
    weights: Params
    all_rows: DecodeState
    requests: Requests
    drafts: DraftInputs
    running: DecodeBatch | None = None
    stats: Stats = dataclasses.field(default_factory=Stats)

    def __post_init__(self):
        self.draft_state = None  # of the draft source, made before the first step that drafts
        # Whether rows hold tokens that the draft source has not seen.
        self.draft_state_stale = bool(self.requests.held_lens.any())
        self.finished = self.requests.done.copy()  # kept up to date where a rollout may end early

    # Rows begin ------------------------------------------------------------------------------

    def prefill(self, index: np.ndarray, slots: int, *, with_drafts: bool) -> DecodeBatch:
        """A batch of the rows `index` int [size], whole groups that hold nothing; -1 is padding."""
        group = self.program.group_size
        prompts = self.requests.prompts.tokens[self._prompts(index[::group])]
        rows = self._gather(index, with_drafts=with_drafts)
        start = time.perf_counter()
        cache = decode.prefill(self.program, self.weights, prompts)
        cache = decode.broadcast_prefill(cache, slots=slots, group_size=group)
        jax.block_until_ready(cache)
        self.stats.prefill_seconds += time.perf_counter() - start
        self.stats.programs.add(("prefill", *prompts.shape))
        batch = self._batch(cache, rows, index)
        self._count(batch)
        return batch

    def _batch(self, cache: KVCache, rows: DecodeState, index: np.ndarray) -> DecodeBatch:
        """Return a batch of the rows `index`, not counted yet."""
        return DecodeBatch(
            cache, rows, len(index), cache_slots(cache), np.count_nonzero(index >= 0)
        )

    def _prompts(self, index: np.ndarray) -> np.ndarray:
        """The prompts of rows, padding with any."""
        return np.where(index >= 0, index, index.max()) // self.program.group_size

    @functools.cached_property
    def draft_tokens(self) -> np.ndarray:
        """int32 [B, R], of the drafts to verify; read when they are first packed."""
        return hosts.fetch(self.drafts.previous.tokens)

    def verify_trie(
        self, index: np.ndarray, tries: DraftTries, width: int
    ) -> tuple[DecodeBatch, StepCounts]:
        """A batch of the rows `index` int [size], which hold nothing before: prompts and drafts of
        at most `width` tokens are computed and verified in one pass over their tries."""
        rows = self._gather(index, with_drafts=True)
        stop = self.stop_condition(max_steps=1)
        start = time.perf_counter()
        cache, rows, counts, progress = decode.verify_trie(
            self.program, self.weights, tries, rows, stop, width=width
        )
        batch = self._batch(cache, rows, index)
        self.draft_state_stale = True
        counts = self._read_counts(batch, counts, progress)
        self.stats.add_verification(*tries.shape, counts, time.perf_counter() - start)
        self.stats.programs.add(("verify_trie", *tries.shape, *batch.shape, width))
        return batch, counts

    def re_prefill(
        self, index: np.ndarray, slots: int, width: int, *, with_drafts: bool
    ) -> DecodeBatch:
        """A batch of the rows `index` int [size], which hold up to `width` tokens but have no
        cache: one pass over prompts and tokens."""
        rows = self._gather(index, with_drafts=with_drafts)
        prompts = self.requests.prompts.tokens[self._prompts(index)]
        start = time.perf_counter()
        cache = decode.re_prefill(
            self.program, self.weights, prompts, rows, slots=slots, width=width
        )
        batch = self._batch(cache, rows, index)
        self._count(batch)
        self.stats.prefill_seconds += time.perf_counter() - start
        self.stats.programs.add(("re_prefill", *batch.shape, width))
        return batch

    def _gather(self, index: np.ndarray, *, with_drafts: bool) -> DecodeState:
        if with_drafts and self.all_rows.draft is None:
            previous = self.drafts.previous
            log_lenience = self.drafts.log_lenience
            self.all_rows = decode_state.with_drafts(
                self.all_rows, previous, self.program.accept, log_lenience
            )
        places = np.where(index >= 0, index % self.requests.shard_rows, -1).astype(np.int32)
        rows = self.all_rows if with_drafts else decode_state.without_drafts(self.all_rows)
        return decode_state.gather(rows, places)

    def _count(self, batch: DecodeBatch) -> None:
        batch.update(hosts.fetch(decode.progress(batch.rows, self.stop_condition())))

    # Rows move -------------------------------------------------------------------------------

    def insert(self, batch: DecodeBatch) -> None:
        """Put a batch's unfinished rows into the running batch."""
        if not batch.unfinished:
            self._write_back_finished(batch)
            return
        running = self.running
        counts = batch.counts
        longest = batch.longest
        if running is not None:
            counts = RowCounts(*map(np.add, running.counts, counts))
            longest = max(running.longest, longest)
        size = self.buckets.rows_for_shards(counts.unfinished)
        slots = self.buckets.slots_for(longest + 1)
        if running is None:
            self.running = self._resized(batch, size, slots)
            return
        self._write_back_finished(batch)
        self._write_back_finished(running)
        running = self.resize(size, slots)
        cache, rows = decode_state.insert(
            running.cache, running.rows, batch.cache, batch.rows, ~batch.rows.done
        )
        draft = max(running.longest_draft, batch.longest_draft)
        total = counts.unfinished.sum()
        self.running = DecodeBatch(cache, rows, size, slots, int(total), counts, longest, draft)

    def resize(self, size: int, slots: int) -> DecodeBatch:
        """The running batch, its unfinished rows compacted into another bucket."""
        self.running = self._resized(self.running, size, slots)
        return self.running

    def _resized(self, batch: DecodeBatch, size: int, slots: int) -> DecodeBatch:
        if (size, slots) == batch.shape:
            return batch
        self._write_back_finished(batch)
        cache, rows = decode_state.resize(
            batch.cache, batch.rows, ~batch.rows.done, size=size, slots=slots
        )
        return dataclasses.replace(batch, cache=cache, rows=rows, size=size, slots=slots)

    def split(self, batch: DecodeBatch, size: int) -> DecodeBatch:
        """Rows that are verifying, in a bucket of `size` rows; the others are inserted."""
        verifying = decode_state.verifying(batch.rows)
        self._write_back_finished(batch)
        cache, rows = decode_state.resize(
            batch.cache, batch.rows, verifying, size=size, slots=batch.slots
        )
        # Only train rows have drafts.
        counts = batch.counts
        next_step = counts.unfinished - counts.verifying
        others = dataclasses.replace(
            batch,
            rows=decode_state.without_drafts(decode_state.mark_padding(batch.rows, verifying)),
            counts=RowCounts(train=next_step, unfinished=next_step, verifying=0 * next_step),
            written_back=int(next_step.sum()),
        )
        verifying_rows = dataclasses.replace(
            batch,
            cache=cache,
            rows=rows,
            size=size,
            counts=counts._replace(train=counts.verifying, unfinished=counts.verifying),
            written_back=batch.verifying,
        )
        if next_step.any():
            self.insert(others)
        return verifying_rows

    def write_back_all(self) -> None:
        """Write the running rows back; then none is running."""
        self.write_back(self.running)
        self.running = None

    def write_back(self, batch: DecodeBatch) -> None:
        self.all_rows = decode_state.scatter(batch.rows, self.all_rows)
        batch.written_back = batch.unfinished

    def _write_back_finished(self, batch: DecodeBatch) -> None:
        """Write rows back that are done, before they leave the batch."""
        if batch.unfinished < batch.written_back:
            self.write_back(batch)

    # The model runs --------------------------------------------------------------------------

    def stop_condition(self, **bounds: Any) -> StopCondition:
        """Return the condition of `bounds`, as in `StopCondition.of`; others never hold."""
        never = {"max_active": -1, "max_len": self.program.response_slots, "max_steps": FOREVER}
        return StopCondition.of(
            num_train_rows=self.requests.shard_train_rows,
            shard_rows=self.requests.shard_rows,
            **never | bounds,
        )

    def run(
        self, batch: DecodeBatch, stop: StopCondition, width: int, *, verify: bool = False
    ) -> StepCounts:
        """Run `decode.decode_steps` on the batch; verify: a verification pass."""
        drafting = self.program.draft_source is not None and width > 1 and not verify
        draft_state = self._synced_draft_state(batch) if drafting else None
        start = time.perf_counter()
        batch.cache, batch.rows, draft_state, counts, progress = decode.decode_steps(
            self.program,
            self.weights,
            batch.cache,
            batch.rows,
            draft_state,
            stop,
            width=width,
            verify=verify,
        )
        if drafting:
            self.draft_state = draft_state
        else:
            self.draft_state_stale = True
        counts = self._read_counts(batch, counts, progress)
        seconds = time.perf_counter() - start
        flags = (drafting, verify, batch.rows.draft is not None)
        self.stats.programs.add(("decode_steps", *batch.shape, width, *flags))
        if verify:
            self.stats.add_verification(batch.size, width, counts, seconds)
        else:
            self.stats.add_decode(batch.shape, width, counts, seconds)
        return counts

    def _read_counts(self, batch: DecodeBatch, counts: StepCounts, progress: Array) -> StepCounts:
        """The counts on the host, once the model has run; notes which rows are done."""
        done = (batch.rows.index, batch.rows.done) if self.requests.ends_early else None
        counts, progress, done = hosts.fetch((counts, progress, done))
        batch.update(progress)
        if done is not None:
            index, done = done
            self.finished[index[done & self.requests.trained(index)]] = True
        return counts

    def _synced_draft_state(self, batch: DecodeBatch) -> Any:
        """The draft source's state for all that rows hold. Steps that do not draft do not write to
        it, nor is it made for them, so that they cost as little as without a draft source."""
        source = self.program.draft_source
        prompts = self.requests.prompts
        if self.draft_state is None:
            history = self.drafts.history
            if history is None:
                history = DraftHistory.empty(len(prompts.lens), self.program.response_slots)
            self.draft_state = source.init(prompts, history, self.program.group_size)
        if self.draft_state_stale:
            self.write_back(batch)
            rows = self.all_rows
            self.draft_state = source.sync(self.draft_state, rows.tokens, rows.lens)
            self.draft_state_stale = False
        return self.draft_state

"""Running batch of one rollout: its cache and rows, the programs that change them, their cost.

Rows that start are written into free slots (`prefill`), all rows decode together, and the batch
shrinks as they finish. `all_rows` has every row in order; a batch writes its rows back there
before their slots are given away. The scheduler decides which rows start, and when what runs.

Between two programs the host reads a few counts. It reads no tokens but those that it packs: the
drafts, and the tokens that rows already have when they start.
"""

import dataclasses
import functools
import operator
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
from jax import Array

from specrl_jax import hosts
from specrl_jax.models.kv_cache import KVCache
from specrl_jax.models.transformer import Params
from specrl_jax.packing import TextSet
from specrl_jax.rollout.engine.all_rows import (
    RowStarts,
    cut_drafts,
    empty_batch,
    init_rows,
    write_held,
)
from specrl_jax.rollout.engine.append import append, pack_appended
from specrl_jax.rollout.engine.decode import StopCondition, decode_steps
from specrl_jax.rollout.engine.prefill import PrefillCounts, prefill
from specrl_jax.rollout.engine.text_states import TextStates, blank_states
from specrl_jax.rollout.engine.texts import TextPaths, Texts, pack_texts
from specrl_jax.rollout.requests import Requests
from specrl_jax.rollout.rows import (
    PADDING,
    Rows,
    compact,
    compact_layer,
    release,
    scatter,
)
from specrl_jax.rollout.spec import RolloutSpec
from specrl_jax.sharding import put, shards


@dataclasses.dataclass
class Stats:
    """Cost of a rollout. Seconds are wall-clock and include waiting for the device."""

    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    decode_steps: int = 0
    row_steps: int = 0  # rows x decode steps computed, empty slots included
    # Slots that `prefill` and `append` computed; of these: those that held a token, those of
    # prompts and held tokens, those whose tokens are now in rows, and those of prompts and held
    # tokens that had been computed before.
    prefilled_tokens: int = 0
    filled_tokens: int = 0
    known_tokens: int = 0
    read_tokens: int = 0
    repeated_tokens: int = 0
    # Draft tokens that the rule decided on: each row's accepted ones and its first rejected one.
    verified_tokens: int = 0
    accepted_tokens: int = 0  # draft tokens that the rule accepted
    drafted_tokens: int = 0  # draft tokens that decode steps accepted and emitted
    # (rows, width, steps) of the decode loops, in order.
    decode_runs: list[tuple[int, int, int]] = dataclasses.field(default_factory=list)

    @classmethod
    def total(cls, parts: Sequence["Stats"]) -> "Stats":
        """Add up several rollouts, one after another."""
        columns = zip(*(dataclasses.astuple(part) for part in parts))
        return cls(*(functools.reduce(operator.add, column) for column in columns))

    @property
    def draft_slots(self) -> float:
        """Slots that were computed for drafts, with their share of the empty ones."""
        drafts = self.filled_tokens - self.known_tokens
        return drafts * self.prefilled_tokens / max(self.filled_tokens, 1)

    def metrics(self) -> dict[str, float]:
        """Return the cost under the names of `metrics.METRICS`."""
        values = {
            "time/prefill": self.prefill_seconds,
            "time/decode": self.decode_seconds,
            "rollout/decode_steps": self.decode_steps,
            "rollout/row_steps": self.row_steps,
            "rollout/tokens_drafted": self.drafted_tokens,
            "rollout/tokens_prefilled": self.prefilled_tokens,
            "rollout/tokens_verified": self.verified_tokens,
        }
        if self.prefilled_tokens:
            rest = {
                "rollout/prefill_empty": self.prefilled_tokens - self.filled_tokens,
                "rollout/prefill_repeated": self.repeated_tokens,
                "rollout/prefill_rejected": self.filled_tokens - self.read_tokens,
            }
            needed = self.prefilled_tokens - sum(rest.values())
            shares = {"rollout/prefill_used": needed} | rest
            values |= {name: count / self.prefilled_tokens for name, count in shares.items()}
        if self.row_steps:
            fed = sum(size * steps * width for size, width, steps in self.decode_runs)
            wide = sum(size * steps for size, width, steps in self.decode_runs if width > 1)
            values["rollout/width_mean"] = fed / self.row_steps
            values["rollout/width_max"] = max(w for _, w, steps in self.decode_runs if steps)
            values["rollout/wide_fraction"] = wide / self.row_steps
        return values


class Runner:
    """Rows of one rollout, those of them that run, and the cost so far.

    Shards have equally many rows, B / shards consecutive ones each.
    """

    def __init__(self, spec: RolloutSpec, weights: Params, requests: Requests):
        """Make all rows; none runs yet.

        Raises ValueError if the shards would not have equally many groups.
        """
        groups = len(requests.prompts.lens)
        if groups % shards("batch"):
            raise ValueError(
                "a rollout's prompts must be divisible by mesh.data x mesh.fsdp = "
                f"{shards('batch')}, got {groups}; set rollout.prompts_per_step"
            )
        self.spec = spec
        self.weights = weights
        self.requests = requests
        self.stats = Stats()
        starts = RowStarts.of(spec, requests)
        noise = requests.noise
        self.all_rows = init_rows(spec, int(noise.purpose), noise.key, starts)
        self.background = starts.background  # bool [B], background rows
        self.finished = starts.done.copy()  # up to date where a rollout may end early
        # Of each row, int32 [B]: the tokens that it held when it last started or continued; the
        # position up to which its draft is verified; and how many draft tokens it was given.
        self.lens = np.zeros(len(self.background), np.int32)
        self.verify_ends = np.zeros(len(self.background), np.int32)
        self.drafted_lens = np.zeros(len(self.background), np.int32)
        self.drafts = requests.drafts
        if requests.held is not None:
            self.all_rows = write_held(self.all_rows, requests.held)
            self.lens = hosts.fetch(requests.held.lens)
        if self.drafts is not None:
            lens = self.drafts.lens
            ends, self.verify_ends = hosts.fetch((lens, cut_drafts(spec, self.all_rows, lens)))
            self.drafted_lens = np.maximum(ends - self.lens, 0)
        self.buckets = spec.buckets(int(np.count_nonzero(~self.background)))
        self.shard_rows = len(self.background) // self.buckets.shards
        self.size = self.buckets.sizes[0]  # slots of the batch
        batch = empty_batch(
            self.spec, self.all_rows, size=self.size, slots=self.buckets.cache_slots
        )
        self.cache: KVCache = batch[0]
        self.rows: Rows = batch[1]
        # Unfinished rows of the batch, [shards]: without background rows, and all.
        self.unfinished_awaited = np.zeros(self.buckets.shards, int)
        self.unfinished_all = np.zeros(self.buckets.shards, int)
        # Unfinished rows when `all_rows` last had every finished one. If fewer are unfinished now,
        # some have finished and are not in `all_rows`.
        self.unfinished_at_write_back = 0
        self._texts: np.ndarray | None = None  # of `_join_texts`, made once rows start
        self._known_texts = TextSet()  # prompts and held tokens that `prefill` has computed
        # Of the last chunk, where chunks are computed as they are needed.
        self._text_states: TextStates | None = None
        self._text_paths: list[TextPaths] = []
        if self.buckets.window_slots:
            self._text_states = blank_states(self.spec, buckets=self.buckets)
            self._text_paths = [TextPaths() for _ in range(self.buckets.shards)]
        self.draft_state: Any = None  # of the draft source, made before the first step that drafts
        # Whether rows have tokens that the draft source has not seen.
        self.draft_state_stale = bool(self.lens.any())

    # Rows start -----------------------------------------------------------------------------------

    def _join_texts(self) -> np.ndarray:
        """Return int32 [B, P + R]: each row's prompt, then its own tokens, then the rest of its
        draft."""
        prompts = self.requests.prompts
        group_size = self.spec.group_size
        tokens = np.zeros((len(self.lens), self.spec.response_slots), np.int32)
        if self.drafts is not None and self.verify_ends.any():
            tokens = hosts.fetch(self.drafts.tokens.ids)
        if self.lens.any():
            own_tokens = hosts.fetch(self.all_rows.tokens.ids)[:, : tokens.shape[1]]
            inside = np.arange(tokens.shape[1]) < self.lens[:, None]
            tokens = np.where(inside, own_tokens, tokens)
        padded = np.pad(prompts.tokens, ((0, 0), (0, tokens.shape[1])))
        texts = np.repeat(padded, group_size, axis=0)
        columns = np.repeat(prompts.lens, group_size)[:, None] + np.arange(tokens.shape[1])
        np.put_along_axis(texts, columns, tokens, axis=1)
        return texts

    def admit(self, row_ids: list[np.ndarray]) -> None:
        """Admit rows. row_ids: one int array per shard."""
        self.write_back_finished()
        if self._texts is None:
            self._texts = self._join_texts()
        every = np.concatenate(row_ids)
        self.unfinished_at_write_back = self.unfinished_all.sum() + len(every)
        prompt_lens = self.requests.prompts.lens[every // self.spec.group_size]
        known_lens = prompt_lens + self.lens[every]
        texts = Texts(
            tokens=self._texts[every],
            lens=prompt_lens + np.maximum(self.lens, self.verify_ends)[every],
            known_lens=known_lens,
            shard_row_ids=[rows % self.shard_rows for rows in row_ids],
            draft_ends=self.verify_ends[every],
        )
        packed = pack_texts(self.buckets, texts, self._text_paths)
        packed = packed._replace(before=self._text_states)
        start = time.perf_counter()
        self.cache, self.rows, self._text_states, counts, unfinished = prefill(
            self.spec,
            self.buckets,
            self.weights,
            self.cache,
            self.rows,
            self.all_rows,
            self.drafts,
            packed,
        )
        counts = self._note_prefill(start, [counts], unfinished)
        distinct = {text[:n].tobytes() for text, n in zip(texts.tokens, known_lens)}
        new = sum(self._known_texts.add(np.frombuffer(text, np.int32)) for text in distinct)
        self.stats.repeated_tokens += int(counts.known) - new

    def slots_of_rows(self) -> np.ndarray:
        """Return each row's slot of the batch, int [B]; -1: it has none."""
        index = hosts.fetch(self.rows.row_ids)
        slots = np.full(len(self.lens), -1)
        inside = np.flatnonzero(index != PADDING)
        slots[index[inside]] = inside
        return slots

    def continue_rows(self, row_ids: np.ndarray, slots: np.ndarray, starts: np.ndarray) -> None:
        """Continue rows in their slots. row_ids: int [k]. slots: int [k], of the whole batch.

        starts: int [k], response position of the first token that has no key in the row's slot.
        """
        self.unfinished_at_write_back = self.unfinished_all.sum() + len(row_ids)
        blocks = pack_appended(
            self.buckets,
            self.shard_rows,
            row_ids,
            slots % (self.size // self.buckets.shards),
            starts,
            self.lens[row_ids],
            self.verify_ends[row_ids],
        )
        start = time.perf_counter()
        counts = []
        for block in blocks:
            self.cache, self.rows, block_counts, unfinished = append(
                self.spec,
                self.buckets,
                self.weights,
                self.cache,
                self.rows,
                self.all_rows,
                self.drafts,
                block,
            )
            counts.append(block_counts)
        self._note_prefill(start, counts, unfinished)

    def _note_prefill(
        self, start: float, parts: list[PrefillCounts], unfinished: Array
    ) -> PrefillCounts:
        """Note the cost of `prefill`, or of `append` for some blocks, and return the counts.

        start: of `time.perf_counter`. parts: the counts of each call. unfinished: of the last.
        """
        parts = self._fetch_counts(parts, unfinished)
        counts = PrefillCounts(*map(sum, zip(*parts)))
        self.draft_state_stale = True
        self.stats.prefill_seconds += time.perf_counter() - start
        self.stats.prefilled_tokens += int(counts.computed)
        self.stats.filled_tokens += int(counts.filled)
        self.stats.known_tokens += int(counts.known)
        self.stats.read_tokens += int(counts.read)
        self.stats.verified_tokens += int(counts.verified)
        self.stats.accepted_tokens += int(counts.accepted)
        return counts

    # Rows decode ----------------------------------------------------------------------------------

    def decode(self, stop: StopCondition, width: int) -> tuple[int, list[int]]:
        """Run decode steps of one width.

        Returns the number of steps, and row steps by the number of accepted draft tokens, [width];
        of width 1 they are not counted.
        """
        draft_state = self._synced_draft_state() if width > 1 else None
        start = time.perf_counter()
        made, unfinished = decode_steps(
            self.spec, self.weights, self.cache, self.rows, draft_state, stop, width=width
        )
        self.cache = made.cache
        self.rows = made.rows
        if width > 1:
            self.draft_state = made.draft_state
        else:
            self.draft_state_stale = True
        counts = (made.steps, made.by_accepted, made.emitted_drafts)
        steps, by_accepted, drafted = self._fetch_counts(counts, unfinished)
        steps = int(steps)
        self.stats.decode_seconds += time.perf_counter() - start
        self.stats.decode_steps += steps
        self.stats.row_steps += steps * self.size
        self.stats.drafted_tokens += int(drafted)
        self.stats.decode_runs.append((self.size, width, steps))
        return steps, by_accepted.tolist()

    def _fetch_counts(self, counts: Any, unfinished: Any) -> Any:
        """Fetch a program's counts; update the numbers of unfinished rows, and `finished`."""
        done = (self.rows.row_ids, self.rows.done) if self.requests.enough_groups else None
        counts, unfinished, done = hosts.fetch((counts, unfinished, done))
        self.unfinished_awaited, self.unfinished_all = unfinished.T
        if done is not None:
            index, done = done
            self.finished[index[done & (index != PADDING)]] = True
        return counts

    def _synced_draft_state(self) -> Any:
        """Return the draft source's state, which then knows all tokens of the rows.

        The first step that drafts makes it. Plain steps do not write to it.
        """
        source = self.spec.draft_source
        if source is None:
            return None
        group_size = self.spec.group_size
        if self.draft_state is None:
            prompts = self.requests.prompts
            history = self.requests.history
            if history is None:
                lens = np.zeros((len(prompts.lens), 0, group_size), np.int32)
                tokens = np.zeros((*lens.shape, self.spec.response_slots), np.int32)
                history = put(tokens, *(None,) * 4), put(lens, *(None,) * 3)
            self.draft_state = source.init(prompts, history, group_size)
        if self.draft_state_stale:
            self.write_back()
            rows = self.all_rows
            self.draft_state = source.sync(self.draft_state, rows.tokens.ids, rows.lens)
            self.draft_state_stale = False
        return self.draft_state

    # Rows move ------------------------------------------------------------------------------------

    def take_over(
        self, all_rows: Rows, lens: np.ndarray, changed: np.ndarray, draft_ends: Array | None
    ) -> None:
        """Take over rows that were given tokens elsewhere, before they continue.

        lens: int32 [B], of what rows have now. changed: bool [B], rows that got tokens. draft_ends:
        int32 [B], on the device, the positions up to which rows have drafts; None: no drafts.
        """
        self._texts = None
        self.all_rows = all_rows
        self.lens = lens
        if draft_ends is None:
            return
        self.drafts = dataclasses.replace(self.drafts, lens=draft_ends)
        ends, cut = hosts.fetch((draft_ends, cut_drafts(self.spec, all_rows, draft_ends)))
        more = np.where(changed, np.maximum(ends - lens, 0), 0)
        self.verify_ends = np.where(changed, cut, self.verify_ends)
        self.drafted_lens = self.drafted_lens + more

    def free(self, over: np.ndarray) -> None:
        """Free the slots of rows that are over, bool [B]."""
        self.rows = release(self.rows, put(over, "batch"))

    def compact(self, size: int) -> None:
        """Give the rows a smaller batch that has room for all unfinished ones."""
        self.write_back_finished()
        layers = list(self.cache)
        self.cache = ()  # so that each layer is freed once it has been moved
        for number, layer in enumerate(layers):
            layers[number] = compact_layer(layer, self.rows.done, self.rows.row_ids, size=size)
        self.cache = tuple(layers)
        self.rows = compact(self.rows, size=size)
        self.size = size

    def write_back(self) -> None:
        self.all_rows = scatter(self.rows, self.all_rows)
        self.unfinished_at_write_back = self.unfinished_all.sum()

    def write_back_finished(self) -> None:
        """Write finished rows back before others take their slots."""
        if self.unfinished_all.sum() < self.unfinished_at_write_back:
            self.write_back()

"""Benchmark `host`: the host's work on the tokens of a step of the paper's size.

SPEC-RL's run (arXiv 2509.23232): 1,024 prompts × 8 responses of up to 4,096 tokens. Tokens and
lengths are random; rows of a group share their prompt. Nothing is computed on a device. Texts of
responses and their rewards are not timed: they depend on the tokenizer and the task.
"""

import heapq
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import numpy as np
import optax

from specrl_jax.algorithms.scoring import RowTokens, pack_rows
from specrl_jax.algorithms.update_spec import make_update_spec
from specrl_jax.benchmarks.rollout import SIZES, Log, Report, seconds_of
from specrl_jax.packing import TextSet
from specrl_jax.rollout.engine.buckets import WINDOW_SLOTS, Buckets
from specrl_jax.rollout.engine.scheduler import whole_groups
from specrl_jax.rollout.engine.texts import PackedTexts, Texts, pack_texts
from specrl_jax.sharding import CHUNK_TOKENS

ROWS = 8_192  # per step
# Seconds of the paper's step with drafts on eight H100s: rollout, verification and assembly, both
# passes for log-probs, and the update (its table of GRPO with 1.7B parameters).
STEP_SECONDS = 135.2 + 22.1 + 1.5 + 17 + 16 + 70
_SHARDS = 8
_GROUP = 8  # rows that share a prompt
_AT_ONCE = 64  # rows that a shard computes at a time
_REPEATS = 3
# Share of its draft that a row keeps, by case; None: there are no drafts.
FILLS = {"no drafts": None, "half of each draft kept": 0.5, "all kept": 1.0}
_MEDIAN = 1_000  # tokens per response
_SIGMA = 0.8  # of the logarithm of their number


def measure_host(config, log: Log) -> Report:
    """Return the seconds of each part, the fastest of three, and their share of a step.

    config: of the run, for its lengths and updates.
    """
    model = SIZES["qwen3_1p7b"].model
    spec = make_update_spec(config, model, optax.constant_schedule(0.0))
    host = random_rows(config, model.vocab_size, ROWS)
    size = min(config.updates.mini_batch_size, ROWS)
    batches = np.split(np.arange(ROWS), ROWS // size)
    parts: dict[str, Callable[[], Any]] = {
        "pack all rows: log-probs": lambda: pack_rows(spec, host, np.arange(ROWS)).count,
        f"pack {len(batches)} mini-batches": lambda: [
            pack_rows(spec, host, part).count for part in batches
        ],
        "pack rows as they start": lambda: _pack_as_they_begin(model, host),
    }
    figures = []
    for name, part in parts.items():
        seconds = min(seconds_of(part) for _ in range(_REPEATS))
        figures.append({"part": name, "seconds": seconds, "of_a_step": seconds / STEP_SECONDS})
        log(f"{name}: {seconds:.3f} s")
    for name, kept in FILLS.items():
        figures.append({"part": f"slots of rows that start: {name}"} | _fill(model, host, kept))
    tokens = int(host.prompt_lens.sum() + host.response_lens.sum())
    return Report(f"host: {ROWS:,} rows, {tokens / 1e6:.1f}M tokens; a step of the paper", figures)


def random_rows(config, vocab: int, rows: int) -> RowTokens:
    """Return rows with prompts of 100 to 400 tokens, or a quarter of the slots at most."""
    rng = np.random.default_rng(0)
    group_size = config.rollout.group_size
    prompt_slots = config.data.prompt_len
    slots = config.rollout.response_len
    longest = min(400, prompt_slots)
    prompt_lens = np.repeat(rng.integers(longest // 4, longest + 1, rows // group_size), group_size)
    prompts = np.repeat(rng.integers(vocab, size=(rows // group_size, longest)), group_size, axis=0)
    lens = np.exp(rng.normal(np.log(min(_MEDIAN, slots / 4)), _SIGMA, rows))
    response_lens = np.clip(lens, 1, slots).astype(np.int32)
    tokens = rng.integers(vocab, size=(rows, prompt_slots + slots), dtype=np.int32)
    positions = np.arange(longest)
    inside = positions < prompt_lens[:, None]
    tokens[:, :longest] = np.where(inside, prompts, tokens[:, :longest])
    after = np.arange(tokens.shape[1]) >= (prompt_lens + response_lens)[:, None]
    tokens[after] = 0
    return RowTokens(tokens, prompt_lens.astype(np.int32), response_lens, slots)


def _pack_as_they_begin(model, host: RowTokens) -> None:
    """Pack whole rows as drafts, as many on each shard at a time as start together."""
    buckets = _buckets(model, host)
    own = len(host.tokens) // buckets.shards
    begin = buckets.refill
    for first in range(0, own - begin + 1, begin):
        index = [np.arange(first, first + begin) for _ in range(buckets.shards)]
        chosen = np.concatenate([x + shard * own for shard, x in enumerate(index)])
        _pack(buckets, host, chosen, index, host.response_lens)


def _buckets(model, host: RowTokens, most_shards: int = _SHARDS) -> Buckets:
    shards = min(most_shards, len(host.tokens))
    return Buckets(
        model,
        min(_AT_ONCE, len(host.tokens) // shards) * shards,
        prompt_slots=host.tokens.shape[1] - host.slots,
        response_slots=host.slots,
        row_buckets=1,
        shards=shards,
    )


def _pack(buckets: Buckets, host: RowTokens, rows, row_ids, draft_lens: np.ndarray) -> PackedTexts:
    known = host.prompt_lens[rows]
    drafts = draft_lens[rows]
    return pack_texts(buckets, Texts(host.tokens[rows], known + drafts, known, row_ids, drafts))


def _fill(model, host: RowTokens, kept: float | None) -> dict[str, float]:
    """Return how full the sequences are in which a shard's rows start, as on an accelerator.

    kept: share of its draft that a row keeps; None: there are no drafts.
    """
    own = len(host.tokens) // min(_SHARDS, len(host.tokens))
    host = RowTokens(
        host.tokens[:own], host.prompt_lens[:own], host.response_lens[:own], host.slots
    )
    draft_lens = host.response_lens * (kept is not None)
    kept_lens = (host.response_lens * (kept or 0.0)).astype(np.int32)
    totals = np.zeros(4, int)  # slots computed, with a token, read, of prompts
    seen = TextSet()
    new = 0
    calls = 0
    with mock.patch.dict(WINDOW_SLOTS, clear=True), mock.patch.dict(CHUNK_TOKENS, clear=True):
        buckets = _buckets(model, host, 1)
        for rows in _admissions(buckets, host.response_lens - kept_lens):
            packed = _pack(buckets, host, rows, [rows], draft_lens)
            order = packed.shard_row_ids[0, : len(rows)]
            known = host.prompt_lens[order]
            totals += _count(packed, [known + draft_lens[order], known + kept_lens[order], known])
            calls += 1
            for row in rows:
                new += seen.add(host.tokens[row, : host.prompt_lens[row]])
    computed, filled, read, prompts = totals.tolist()
    shares = {
        "fill": read - prompts + new,
        "empty": computed - filled,
        "repeated": prompts - new,
        "rejected": filled - read,
    }
    return {"calls": calls} | {name: count / computed for name, count in shares.items()}


def _admissions(buckets: Buckets, steps: np.ndarray) -> Iterator[np.ndarray]:
    """Yield the rows that start together on one shard. steps: int [B], decode steps of each row."""
    queue = list(range(len(steps)))
    ends: list[int] = []  # a heap: steps at which running rows are done
    now = 0
    while queue:
        enough = min(len(queue), buckets.refill)
        while buckets.sizes[0] - len(ends) < enough or (ends and ends[0] <= now):
            now = max(now, heapq.heappop(ends))
        most = min(len(queue), buckets.sizes[0] - len(ends))
        count = whole_groups(queue, most, _GROUP)
        for row in queue[:count]:
            heapq.heappush(ends, now + int(steps[row]))
        yield np.array(queue[:count])
        del queue[:count]


def _count(packed: PackedTexts, lens: list[np.ndarray]) -> np.ndarray:
    """Count computed slots of one shard, and those of the first `lens` [k] tokens of its rows."""
    counts = [int(packed.count) * packed.sequences.tokens[0].size]
    rows = np.arange(len(lens[0]))
    chunk = np.searchsorted(packed.first_row[0], rows, side="right") - 1
    nodes = packed.nodes[0, : len(rows)]
    slots = chunk[:, None] * packed.sequences.tokens[0].size + nodes
    positions = np.arange(nodes.shape[1])
    counts += [len(np.unique(slots[(positions < n[:, None]) & (nodes >= 0)])) for n in lens]
    return np.array(counts)

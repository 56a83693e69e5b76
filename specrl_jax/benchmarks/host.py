"""Benchmark `host`: what the host does with the tokens of a step of the paper's size.

SPEC-RL's run (arXiv 2509.23232): 1,024 prompts × 8 responses of up to 4,096 tokens. Tokens and
lengths are random; rows of a group share their prompt. Nothing is computed on a device. Texts of
responses and their rewards are not timed: they are what the tokenizer and the task take.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import optax

from specrl_jax.algorithms.scoring import RowTokens, pack_rows
from specrl_jax.algorithms.update_spec import make_update_spec
from specrl_jax.benchmarks.rollout import SIZES, Log, Report, seconds_of
from specrl_jax.rollout.engine.buckets import Buckets
from specrl_jax.rollout.engine.extend import pack_texts

ROWS = 8_192  # of a step
# Seconds of the paper's step with drafts on eight H100s: rollout, verification and assembly, both
# passes for log-probs, and the update (its table of GRPO with 1.7B parameters).
STEP_SECONDS = 135.2 + 22.1 + 1.5 + 17 + 16 + 70
_SHARDS = 8
_AT_ONCE = 64  # rows that a shard computes at once
_REPEATS = 3
_MEDIAN = 1_000  # tokens of a response
_SIGMA = 0.8  # of the logarithm of their number


def measure_host(config, log: Log) -> Report:
    """Return the seconds of each part, the fastest of three, and their share of a step.

    config: of the run, whose lengths and updates are taken.
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
        "pack rows as they begin": lambda: _pack_as_they_begin(model, host),
    }
    figures = []
    for name, part in parts.items():
        seconds = min(seconds_of(part) for _ in range(_REPEATS))
        figures.append({"part": name, "seconds": seconds, "of_a_step": seconds / STEP_SECONDS})
        log(f"{name}: {seconds:.3f} s")
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
    """Pack whole rows as drafts, as many on each shard at a time as begin together."""
    rows = len(host.tokens)
    shards = min(_SHARDS, rows)
    own = rows // shards
    at_once = min(_AT_ONCE, own)
    buckets = Buckets(
        model,
        at_once * shards,
        prompt_slots=host.tokens.shape[1] - host.slots,
        response_slots=host.slots,
        row_buckets=1,
        shards=shards,
    )
    begin = buckets.refill
    for first in range(0, own - begin + 1, begin):
        index = [np.arange(first, first + begin) for _ in range(shards)]
        chosen = np.concatenate([x + shard * own for shard, x in enumerate(index)])
        tokens = host.tokens[chosen]
        lens = host.prompt_lens[chosen] + host.response_lens[chosen]
        pack_texts(buckets, tokens, lens, index, host.response_lens[chosen])

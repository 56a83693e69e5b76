"""Drafts of the learned head: they change no token, and its cache equals that of a whole pass."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import rollout_reference as ref
from rollout_reference import SAMPLING, TREE, check_equal, history_of, host, match_spec, run

from specrl_jax.models.draft_head import DraftHead, copy_draft_head, init_draft_head
from specrl_jax.models.transformer import Transformer
from specrl_jax.rollout.sampling import NoiseKey, SamplingConfig, sample, temper, truncate
from specrl_jax.sharding import axes, put

MODEL = ref.ONE_LAYER
R = 8


def weights_of(vocab=0, nudge=0.0):
    """The rollout's weights with an untrained head, which drafts tokens of all kinds."""
    params, weights = ref.policy(nudge, MODEL)
    head = init_draft_head(MODEL, params)
    counts = put(np.arange(MODEL.vocab_size, dtype=np.int32)[::-1], None) if vocab else None
    return weights | {"draft_head": copy_draft_head(MODEL, head, params, counts, vocab=vocab)}


def head_spec(width, coupled=True, **kwargs):
    spec = match_spec(**({"max_width": width} | kwargs))
    return dataclasses.replace(spec, draft_head=spec.sampling if coupled else SamplingConfig(0))


@pytest.fixture(scope="module")
def base(make_mesh):
    """Prompts, the plain rollout, and one of an earlier policy."""
    with jax.set_mesh(make_mesh(1, 1, 1)):
        prompts = ref.random_prompts()
        plain, _ = run(match_spec(), weights_of(), prompts, 1)
        old, _ = run(match_spec(), weights_of(nudge=0.1), prompts, 0)
        yield prompts, host(plain), host(old)


CASES = {
    "greedy": (1, {"width": 4, "coupled": False}, {}),
    "widest": (1, {"width": R}, {}),
    "a queue": (1, {"width": 4, "row_buckets": 3, "max_rows": 8}, {}),
    "with a tree": (1, {"width": 4, "tree": TREE}, {}),
    "few tokens on eight devices": (2, {"width": 4}, {"vocab": 6}),
}


SLOW = ("greedy", "widest", "a queue", "with a tree")


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[pytest.mark.slow] * (case in SLOW)) for case in CASES]
)
def test_a_head_changes_no_token(base, make_mesh, case):
    """Nor where earlier responses are verified before it drafts."""
    prompts, plain, old = base
    pieces, options, of_weights = CASES[case]
    with jax.set_mesh(make_mesh(pieces, pieces, pieces)):
        weights = weights_of(**of_weights)
        spec = head_spec(**options)
        drafts = ref.as_drafts(old)
        for inputs in ({}, {"drafts": drafts}):
            if spec.draft_source:
                inputs["history"] = history_of(spec, old.tokens.ids, old.lens)
            got, stats = run(spec, weights, prompts, 1, **inputs)
            check_equal(got, plain, but=("sources", "prefix_lens"))
            assert stats.drafted_tokens > 0


def test_the_head_drafts_what_a_whole_pass_says(base, make_mesh):
    """Steps of width 2: simulated on the finished responses by one pass of the head over them,
    without a cache."""
    prompts, plain, _ = base
    with jax.set_mesh(make_mesh(1, 1, 1)):
        weights = weights_of()
        spec = head_spec(2, row_buckets=1)
        _, stats = run(spec, weights, prompts, 1)
        group = spec.group_size
        rows = len(plain.lens)
        lens = np.repeat(prompts.lens, group)
        texts = np.zeros((rows, prompts.tokens.shape[1] + R), np.int32)
        for row, text in enumerate(texts):
            end = lens[row] + plain.lens[row]
            text[: lens[row]] = prompts.tokens[row // group][: lens[row]]
            text[lens[row] : end] = plain.tokens.ids[row][: plain.lens[row]]
        params = ref.policy(0.0, MODEL)[0]
        model = Transformer(MODEL, params)
        tokens = put(texts, "batch", None)
        states, _ = model(tokens)
        before = jnp.concatenate([states[:, :1], states[:, :-1]], axis=1)
        slots = jnp.broadcast_to(
            jnp.arange(texts.shape[1]), texts.shape, out_sharding=axes("batch", None)
        )
        guessing, _ = DraftHead(MODEL, weights["draft_head"])(
            before, model.lookup(tokens), positions_BT=slots
        )
        # The guess at a slot is for the token of the next one.
        seeds = ref.start(spec, prompts, NoiseKey(jax.random.key(ref.KEY), 1)).seeds
        positions = put(np.arange(texts.shape[1])[None] + 1 - lens[:, None], "batch", None)
        logits = truncate(temper(model.logits(guessing), SAMPLING), SAMPLING)
        guesses = np.asarray(sample(logits, seeds, positions, SAMPLING)[0])
    counts = np.zeros(2, int)
    for row in range(rows):
        length = 1  # the first token is sampled as the row starts
        while length < plain.lens[row]:
            slot = lens[row] + length - 1
            right = guesses[row, slot] == texts[row, slot + 1]
            counts[int(right)] += 1
            length += 1 + int(right)
    assert stats.drafted_tokens == counts[1] > 0

"""One pass of the head, in interpret mode, against distributions that are made of logits."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import rollout_reference as ref

from specrl_jax.models import head_gpu
from specrl_jax.models.config import ModelConfig
from specrl_jax.models.head import KERNEL
from specrl_jax.models.transformer import Transformer
from specrl_jax.rollout.fused_sampling import FusedDistributions, distributions
from specrl_jax.rollout.sampling import SamplingConfig
from specrl_jax.sharding import put

SIZE = 32  # of a state
ONE_PASS = (KERNEL,)


@pytest.fixture(autouse=True)
def interpreted(monkeypatch):
    monkeypatch.setattr(head_gpu, "_INTERPRET", True)


def head_of(vocab_size: int, **changes) -> ModelConfig:
    """A model that is a head alone."""
    sizes = {"embed_dim": SIZE, "mlp_dim": 1, "num_layers": 0, "head_dim": 1} | changes
    return ModelConfig(vocab_size, num_heads=1, num_kv_heads=1, **sizes)


def policy_of(model: ModelConfig, head, states, seeds, positions, config, k=0):
    params = {"embed": head, "final_norm": jnp.ones(model.embed_dim), "layers": ()}
    return distributions(Transformer(model, params), states, seeds, positions, config, k)


def draw_arrays(model: ModelConfig, batch: int, width: int, seed: int = 0) -> list[jax.Array]:
    """Random head, states, seeds, positions, and given tokens."""
    rng = np.random.default_rng(seed)
    head = rng.normal(0, 0.4, (model.vocab_size, model.embed_dim)).astype(model.dtype)
    states = rng.normal(size=(batch, width, model.embed_dim)).astype(model.dtype)
    seeds = rng.integers(0, 2**32, (batch, 2), dtype=np.uint32)
    positions = rng.integers(0, 4_096, (batch, width)).astype(np.int32)
    given = rng.integers(0, model.vocab_size, (batch, width)).astype(np.int32)
    rows = [put(x, "batch", *(None,) * (x.ndim - 1)) for x in (states, seeds, positions, given)]
    return [put(head, "vocab", None), *rows]


@functools.partial(jax.jit, static_argnums=(0, 1))
def sample_and_score(model, config, head, states, seeds, positions, given):
    policy = policy_of(model, head, states, seeds, positions, config)
    assert isinstance(policy, FusedDistributions) == bool(model.kernels)
    return policy.sample(), policy.score(given)


def check_one_pass(model: ModelConfig, config: SamplingConfig, arrays: list) -> np.ndarray:
    """Tokens are those of the logits, log-probs up to rounding; returns the sampled tokens."""
    wanted = sample_and_score(model, config, *arrays)
    got = sample_and_score(model.replace(kernels=ONE_PASS), config, *arrays)
    for columns, expected in zip(got, wanted, strict=True):
        np.testing.assert_array_equal(columns.ids, expected.ids)
        for name in ("policy_logprobs", "sampling_logprobs"):
            mine, theirs = getattr(columns, name), getattr(expected, name)
            np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=1e-5)
    return np.asarray(got[0].ids)


@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize(
    ("vocab_size", "batch", "width", "changes", "mesh_shape"),
    [
        (96, 48, 1, {}, (1, 1, 1)),  # one column
        (1_280, 24, 4, {"unused_ids": ((1_270, 1_280), (6, 8))}, (1, 1, 1)),  # columns of 128
        (1_920, 9, 8, {"final_softcap": 2.0, "dtype": "bfloat16"}, (1, 1, 1)),  # of 384
        (1_840, 24, 2, {"embed_dim": 48}, (1, 1, 1)),  # of 16
        (2_304, 16, 3, {"unused_ids": ((0, 576),), "final_softcap": 5.0}, (2, 1, 4)),
        (2_304, 8, 4, {}, (1, 1, 8)),  # of 48 on each device
    ],
)
def test_one_pass_of_the_head_gives_the_tokens_of_the_logits(
    make_mesh, vocab_size, batch, width, changes, mesh_shape, temperature
):
    model = head_of(vocab_size, **changes)
    with jax.set_mesh(make_mesh(*mesh_shape)):
        arrays = draw_arrays(model, batch, width)
        tokens = check_one_pass(model, SamplingConfig(temperature), arrays)
    assert len(np.unique(tokens)) > 8
    for first, stop in model.unused_ids:
        assert not ((first <= tokens) & (tokens < stop)).any()


@pytest.mark.parametrize("mesh_shape", [(1, 1, 1), (1, 1, 2)])
def test_of_equal_logits_greedy_takes_the_first_token(make_mesh, mesh_shape):
    """In one column, in several, and on several devices."""
    model = head_of(1_280).replace(kernels=ONE_PASS)  # token c * 10 + n in row c and column n
    states = np.zeros((4, 1, SIZE), np.float32)
    head = np.zeros((1_280, SIZE), np.float32)
    for row, tokens in enumerate([(25, 35), (31, 22), (655, 27), (1_279, 8)]):
        states[row, 0, row] = 1
        head[list(tokens), row] = 1
    with jax.set_mesh(make_mesh(*mesh_shape)):
        _, seeds, positions, given = draw_arrays(model, 4, 1)[1:]
        placed = put(head, "vocab", None), put(states, "batch", None, None)
        sampled, _ = sample_and_score(model, SamplingConfig(0), *placed, seeds, positions, given)
    np.testing.assert_array_equal(sampled.ids[:, 0], [25, 22, 27, 8])


def test_a_given_token_that_is_unused_has_no_chance(mesh):
    model = head_of(1_280, unused_ids=((640, 1_280),), kernels=ONE_PASS)
    *arrays, _ = draw_arrays(model, 2, 1)
    given = put(np.array([[640], [639]], np.int32), "batch", None)
    _, scored = sample_and_score(model, SamplingConfig(), *arrays, given)
    assert np.isneginf(scored.policy_logprobs[0, 0])
    assert np.isfinite(scored.policy_logprobs[1, 0])


@pytest.mark.parametrize(
    ("config", "k", "weigh"),
    [
        (SamplingConfig(0.7, top_k=5), 0, None),
        (SamplingConfig(0.7, top_p=0.9), 0, None),
        (SamplingConfig(), 3, None),
        (SamplingConfig(), 0, jnp.negative),
    ],
)
def test_what_needs_all_logits_is_given_them(mesh, config, k, weigh):
    """Truncation, the likeliest tokens, and other weights, whatever kernel a run takes."""
    model = head_of(1_280)
    *arrays, _ = draw_arrays(model, 8, 2)

    @functools.partial(jax.jit, static_argnums=0)
    def draw(model, *arrays):
        return policy_of(model, *arrays, config, k).sample(weigh)

    wanted = draw(model, *arrays)
    got = draw(model.replace(kernels=ONE_PASS), *arrays)
    for mine, theirs in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=1e-5)


# Whole rollouts


@pytest.mark.parametrize("accept", ["ratio", pytest.param("match", marks=pytest.mark.slow)])
def test_rollouts_in_one_pass_are_those_of_logits(mesh, accept):
    """Prompts alone, then drafts that are verified, and wide steps with drafts of the tree."""
    model = ref.ONE_LAYER.replace(vocab_size=1_280, embed_dim=16)
    spec = ref.match_spec(4, sampling=SamplingConfig(0.3), accept=accept, row_buckets=1)
    prompts = ref.random_prompts()

    def roll_out(kernels: tuple[str, ...]) -> tuple:
        own = dataclasses.replace(spec, model=model.replace(kernels=kernels))
        old, _ = ref.run(own, ref.policy(0.1, model)[1], prompts, 0)
        drafts = ref.as_drafts(old)
        history = ref.history_of(own, old.tokens.ids, old.lens)
        weights = ref.policy(0.0, model)[1]
        new, _ = ref.run(own, weights, prompts, 1, drafts=drafts, history=history)
        return old, new

    old, new = roll_out(ONE_PASS)
    old_of_logits, new_of_logits = roll_out(())
    ref.check_equal(old, old_of_logits)
    ref.check_equal(new, new_of_logits)
    prefix_lens = np.asarray(new.prefix_lens)
    assert prefix_lens.any()
    assert (prefix_lens < np.asarray(old.lens)).any()

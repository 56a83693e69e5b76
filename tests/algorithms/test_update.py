"""One optimizer step against a loss written down row by row, without padding, masks or batches."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from update_reference import (
    GRADIENT,
    LEARNER,
    LOSS,
    MODEL,
    PROMPT,
    RESPONSE,
    ROWS,
    distance,
    gradient,
    host_batch,
    on_mesh,
    pack,
    place_params,
    plain_loss,
    row_scores,
)

from specrl_jax.algorithms.learner import Critic, init_train_state
from specrl_jax.algorithms.scoring import critic_values, logprob_gap, logprobs
from specrl_jax.algorithms.update import join, make_batch, update
from specrl_jax.models import transformer
from specrl_jax.models.transformer import Transformer
from specrl_jax.rollout.acceptance import Ratio
from specrl_jax.rollout.engine.spec import ProgramSpec
from specrl_jax.rollout.generate import Noise, RolloutSpec, generate
from specrl_jax.rollout.sampling import SamplingConfig
from specrl_jax.sharding import put
from specrl_jax.types import Batch, Example, Prompts, Rollout


@pytest.mark.parametrize(
    "changes",
    [
        {},
        pytest.param(
            {"aggregation": "sequence", "dual_clip": 0.0, "kl_coef": 0.5, "kl_estimator": "k2"},
            marks=pytest.mark.slow,
        ),
        {"kl_coef": 0.5, "kl_estimator": "k3", "entropy_coef": 0.1},
    ],
    ids=str,
)
def test_the_gradient_is_that_of_the_formula(mesh, changes):
    settings = dataclasses.replace(LOSS, **changes)
    batch = host_batch(reference=bool(settings.kl_coef))
    learner = dataclasses.replace(LEARNER, loss=settings)
    got, metrics = gradient(learner, batch)
    value, want = jax.jit(
        jax.value_and_grad(lambda p: plain_loss(p, batch, settings, range(ROWS)))
    )(place_params())
    assert distance(got, want) <= 2e-6
    np.testing.assert_allclose(metrics["loss"], value, rtol=1e-5)
    np.testing.assert_allclose(metrics["grad_norm"], optax.tree.norm(want), rtol=1e-5)
    assert metrics["tokens"] == batch.response_lens.sum()
    assert ("kl" in metrics) == bool(settings.kl_coef)
    assert 0 < metrics["clip_fraction"] < metrics["tokens"]


def test_only_the_rows_of_the_mini_batch_count(mesh):
    """Its normalizer too is its own; what lies behind a row's end reaches nothing."""
    batch, rows = host_batch(), np.array([3, 2])
    got, metrics = gradient(LEARNER, batch, rows=rows)
    want = jax.jit(jax.grad(lambda p: plain_loss(p, batch, LOSS, rows)))(place_params())
    assert distance(got, want) <= 2e-6
    assert metrics["tokens"] == batch.response_lens[rows].sum()

    outside = np.arange(RESPONSE) >= batch.response_lens[:, None]
    outside[[0, 1]] = True
    end = batch.prompt_lens + batch.response_lens
    spoiled = dataclasses.replace(
        batch,
        tokens=np.where(np.arange(PROMPT + RESPONSE) >= end[:, None], 7, batch.tokens),
        old_logprobs=np.where(outside, -np.inf, batch.old_logprobs).astype(np.float32),
        advantages=np.where(outside, np.nan, batch.advantages).astype(np.float32),
    )
    again, _ = gradient(LEARNER, spoiled, rows=rows)
    jax.tree.map(np.testing.assert_array_equal, got, again)


def _plain_values(trunk, head, batch: Batch, row: int):
    """V of the states before each token of a response, from a pass over this row alone."""
    first, count = batch.prompt_lens[row], batch.response_lens[row]
    hidden, _ = Transformer(MODEL, trunk)(jnp.asarray(batch.tokens[row, : first + count])[None])
    hidden = jax.sharding.reshard(hidden, jax.P(None, None, None))
    return hidden[0, first - 1 : -1] @ head


@pytest.mark.parametrize("kind", [pytest.param("head", marks=pytest.mark.slow), "network"])
def test_a_critic_learns_beside_the_policy(mesh, kind):
    """Both gradients are those of policy loss + coef x value loss, written row by row."""
    rng = np.random.default_rng(8)
    critic = Critic(kind, coef=0.7, clip=0.3, optimizer=GRADIENT)
    learner = dataclasses.replace(LEARNER, critic=critic)
    values, returns = rng.normal(0, 0.5, (2, ROWS, RESPONSE)).astype(np.float32)
    batch = dataclasses.replace(host_batch(), values=values, returns=returns)
    state = init_train_state(learner, place_params())
    assert not np.any(state.critic["head"])
    start = state.critic | {"head": put(rng.normal(size=8).astype(np.float32), None)}
    if kind == "network":  # it begins as the policy; here it has moved on
        start["decoder"] = jax.tree.map(lambda x: x + 0.1, start["decoder"])
    state = dataclasses.replace(state, critic=start)

    def loss(params, critic):
        trunk, errors = critic.get("decoder", params), []
        for row in range(ROWS):
            estimates = _plain_values(trunk, critic["head"], batch, row)
            old, target = (x[row, : len(estimates)] for x in (values, returns))
            clipped = jnp.clip(estimates, old - 0.3, old + 0.3)
            errors.append(jnp.maximum((estimates - target) ** 2, (clipped - target) ** 2) / 2)
        error = jnp.mean(jnp.concatenate(errors))
        return plain_loss(params, batch, LOSS, range(ROWS)) + 0.7 * error, error

    placed = on_mesh(batch)
    packed = pack(placed, learner)
    estimates = critic_values(learner, state, packed)
    for row, n in enumerate(batch.response_lens):
        expected = _plain_values(start.get("decoder", place_params()), start["head"], batch, row)
        np.testing.assert_allclose(estimates[row, :n], expected, rtol=1e-4, atol=1e-5)
    (_, error), want = jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))(
        place_params(), start
    )
    state, metrics = update(learner, state, placed, packed)
    assert distance(state.opt_state, want[0]) <= 2e-6
    assert distance(state.critic_opt_state, want[1]) <= 2e-6
    np.testing.assert_allclose(metrics["critic_loss"], error, rtol=1e-5)
    np.testing.assert_allclose(metrics["critic_grad_norm"], optax.tree.norm(want[1]), rtol=1e-5)
    plain = gradient(LEARNER, host_batch())[1]
    np.testing.assert_allclose(metrics["loss"], plain["loss"], rtol=1e-5)


def test_a_frozen_policy_keeps_its_weights_and_its_optimizers_state(mesh):
    """The first update after four frozen ones equals an update of a fresh optimizer: the schedule
    is at step 0 and the moments hold its own gradient alone."""
    only_step_0 = optax.piecewise_constant_schedule(0.1, {1: 0.0})
    optimizer = optax.adamw(only_step_0, weight_decay=0.5)
    critic = Critic("head", coef=0.7, clip=0.3, optimizer=optax.sgd(0.1))
    learner = dataclasses.replace(LEARNER, optimizer=optimizer, critic=critic)
    values, returns = np.random.default_rng(8).normal(0, 0.5, (2, ROWS, RESPONSE))
    values, returns = np.float32(values), np.float32(returns)
    batch = on_mesh(dataclasses.replace(host_batch(), values=values, returns=returns))
    packed = pack(batch, learner)
    start = jax.device_get(init_train_state(learner, place_params()))
    state = init_train_state(learner, place_params())
    for _ in range(4):
        state, metrics = update(learner, state, batch, packed, policy_frozen=True)
    frozen = jax.device_get(state)
    jax.tree.map(np.testing.assert_array_equal, frozen.params, start.params)
    jax.tree.map(np.testing.assert_array_equal, frozen.opt_state, start.opt_state)
    assert not np.array_equal(frozen.critic["head"], start.critic["head"])
    assert metrics["grad_norm"] > 0

    fresh = dataclasses.replace(init_train_state(learner, place_params()), critic=state.critic)
    fresh = jax.tree.map(jnp.copy, fresh)
    after, _ = update(learner, state, batch, packed)
    expected, _ = update(learner, fresh, batch, packed)
    jax.tree.map(np.testing.assert_array_equal, after.params, expected.params)
    assert distance(after.params, start.params) > 0.01


def test_responses_stand_right_behind_their_prompts(mesh):
    """Worked rows: prompts "7", "7 8" and "7 8 9", responses cut to two slots."""
    prompts = np.array([[7, 0, 0], [7, 8, 0], [7, 8, 9]], np.int32)
    responses = np.array([[1, 2, 0], [3, 0, 0], [4, 5, 0]], np.int32)
    lens = put(np.array([1, 2, 3], np.int32), "batch")
    got = join(put(prompts, "batch", None), lens, put(responses, "batch", None), response_slots=2)
    np.testing.assert_array_equal(got, [[7, 1, 2, 0, 0], [7, 8, 3, 0, 0], [7, 8, 9, 4, 5]])


@pytest.mark.parametrize("slots", [2, 4])
def test_a_batch_of_a_rollout(mesh, slots):
    """Two prompts, two responses each, of which the second fills its slots."""
    prompts = Prompts(
        tokens=np.array([[7, 8, 0], [9, 0, 0]], np.int32),
        lens=np.array([2, 1], np.int32),
        ids=np.zeros((2, 2), np.uint32),
        examples=(Example("0" * 16, "", "", "", {}),) * 2,
    )
    lens = np.array([1, slots, 1, 1], np.int32)
    tokens = np.where(np.arange(4) < lens[:, None], np.arange(1, 5) + 4 * np.arange(4)[:, None], 0)
    tokens = tokens.astype(np.int32)
    scores = np.where(tokens > 0, -0.5 * tokens, 0).astype(np.float32)
    values = {f.name: scores * np.nan for f in dataclasses.fields(Rollout)}
    values |= {"tokens": tokens, "lens": lens, "policy_logprobs": scores}
    rollout = on_mesh(Rollout(**values))
    batch = make_batch(prompts, rollout, slots)
    np.testing.assert_array_equal(batch.prompt_lens, [2, 2, 1, 1])
    np.testing.assert_array_equal(batch.response_lens, lens)
    np.testing.assert_array_equal(batch.old_logprobs, scores[:, :slots])
    np.testing.assert_array_equal(batch.advantages, np.zeros((4, slots)))
    assert batch.ref_logprobs is None
    want = np.zeros((4, 3 + slots), np.int32)
    for row, prompt in enumerate(([7, 8], [7, 8], [9], [9])):
        joined = [*prompt, *tokens[row, :slots]]
        want[row, : len(joined)] = joined
    np.testing.assert_array_equal(batch.tokens, want)


def test_logprobs_are_those_of_each_row_alone(mesh):
    batch, params = host_batch(shared=True), place_params()
    got = np.asarray(logprobs(LEARNER, params, pack(on_mesh(batch))))
    ends = batch.prompt_lens + batch.response_lens
    rows = [batch.tokens[b, : ends[b]] for b in range(ROWS)]
    starts = batch.prompt_lens
    every = jax.jit(lambda p: [row_scores(p, r, s, 0.8)[0] for r, s in zip(rows, starts)])
    for b, want in enumerate(every(params)):
        np.testing.assert_allclose(got[b, : len(want)], want, rtol=1e-5, atol=1e-5)


def test_the_gap_is_a_mean_over_response_tokens(mesh):
    batch = host_batch()
    other = batch.old_logprobs + np.float32(0.25)
    other[np.arange(RESPONSE) >= batch.response_lens[:, None]] = np.nan
    gap = logprob_gap(on_mesh(batch), put(other, "batch", None))
    np.testing.assert_allclose(gap, 0.25, rtol=1e-5)


@pytest.fixture
def fresh(mesh):
    """(learner, parameters, batch) of a rollout that the parameters have just made."""
    params, sampling = place_params(), SamplingConfig(0.8, top_k=6)
    setup = ProgramSpec(MODEL, sampling, Ratio(), (1,), 0, RESPONSE, 3)
    plan = RolloutSpec(setup, PROMPT, group_size=2, row_buckets=2, cache_lengths=1)
    host = host_batch()
    inside = np.arange(PROMPT) < host.prompt_lens[:, None]
    prompts = Prompts(
        tokens=np.where(inside, host.tokens[:, :PROMPT], 0),
        lens=host.prompt_lens,
        ids=np.arange(2 * ROWS, dtype=np.uint32).reshape(ROWS, 2),
        examples=(Example("0" * 16, "", "", "", {}),) * ROWS,
    )
    weights = jax.jit(transformer.rollout_weights, static_argnums=0)(MODEL, params)
    rollout = generate(plan, weights, prompts, Noise(jax.random.key(0), 1)).rollout
    batch = make_batch(prompts, rollout, RESPONSE)
    advantages = np.tile(np.linspace(-1, 1, 2 * ROWS, dtype=np.float32)[:, None], (1, RESPONSE))
    return LEARNER, params, dataclasses.replace(batch, advantages=put(advantages, "batch", None))


def test_the_rollouts_logprobs_are_the_updates(fresh):
    learner, params, batch = fresh
    got = logprobs(learner, params, pack(batch, learner, range(2 * ROWS)))
    mask = np.arange(RESPONSE) < np.asarray(batch.response_lens)[:, None]
    one, two = (np.where(mask, x, 0) for x in (got, batch.old_logprobs))
    np.testing.assert_allclose(one, two, rtol=1e-5, atol=1e-5)
    assert np.any(one)
    assert logprob_gap(batch, got) < 1e-6


def test_before_the_first_update_nothing_is_clipped_and_the_kl_is_0(fresh):
    learner, params, batch = fresh
    reference = logprobs(learner, params, pack(batch, learner, range(2 * ROWS)))
    batch = dataclasses.replace(batch, ref_logprobs=reference)
    learner = dataclasses.replace(learner, loss=dataclasses.replace(LOSS, kl_coef=0.1))
    state = init_train_state(learner, params)
    _, sums = update(learner, state, batch, pack(batch, learner, range(2 * ROWS)))
    tokens = float(sums["tokens"])
    assert abs(float(sums["kl"])) / tokens < 1e-7
    assert float(sums["clip_fraction"]) == 0
    np.testing.assert_allclose(sums["ratio_mean"] / tokens, 1, rtol=1e-6)
    lens = np.asarray(batch.response_lens)
    per_row = np.asarray(batch.advantages)[:, 0]
    np.testing.assert_allclose(sums["loss"], -np.sum(per_row * lens) / lens.sum(), atol=1e-6)

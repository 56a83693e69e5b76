"""One optimizer step against the loss of rows that are scored one by one."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import update_reference as ref

from specrl_jax.algorithms.scoring import critic_values, logprob_gap
from specrl_jax.algorithms.update import make_batch, update
from specrl_jax.algorithms.update_spec import Critic, init_policy_state
from specrl_jax.models.transformer import Transformer
from specrl_jax.packing import PACKINGS
from specrl_jax.sharding import put
from specrl_jax.types import Batch, Example, Prompts, Rollout, Tokens


@pytest.fixture(scope="module")
def formula(make_mesh):
    """(batch, settings, loss, its gradient) of rows that are scored one by one; row 3 is given."""
    settings = dataclasses.replace(ref.LOSS, kl_coef=0.5, entropy_coef=0.1)
    batch = ref.host_batch(reference=True, shared=True)
    batch = dataclasses.replace(batch, supervised=np.float32(0.5 * (np.arange(ref.ROWS) == 3)))
    with jax.set_mesh(make_mesh(1, 1, 1)):
        loss = jax.jit(
            jax.value_and_grad(lambda p: ref.plain_loss(p, batch, settings, range(ref.ROWS)))
        )
        return batch, settings, *loss(ref.place_params())


@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize("chunk", [ref.TWO_ROWS, 256])
def test_the_gradient_is_that_of_the_formula(mesh, formula, packing, chunk):
    """Rows 0 and 1 share their prompt, rows 2 and 3 all but their last token."""
    batch, settings, value, want = formula
    update_spec = dataclasses.replace(ref.LEARNER, loss=settings, packing=packing)
    got, metrics = ref.gradient(update_spec, batch, chunk=chunk)
    assert ref.distance(got, want) <= 2e-6
    np.testing.assert_allclose(metrics["loss"], value, rtol=1e-5)
    np.testing.assert_allclose(metrics["grad_norm"], optax.tree.norm(want), rtol=1e-5)
    assert metrics["tokens"] == batch.response_lens[:3].sum()
    row = batch.tokens[3, : batch.prompt_lens[3] + batch.response_lens[3]]
    log_p, _ = ref.row_scores(ref.place_params(), row, batch.prompt_lens[3], 0.8)
    want = [-log_p.sum(), batch.response_lens[3]]
    np.testing.assert_allclose(metrics["policy/solution_nll"], want, rtol=1e-5)
    assert "kl" in metrics
    assert 0 < metrics["clip_fraction"] < metrics["tokens"]


def test_only_the_rows_of_the_mini_batch_count(mesh):
    """Its normalizer too is its own; what lies behind a row's end reaches nothing."""
    batch, rows = ref.host_batch(), np.array([3, 2])
    got, metrics = ref.gradient(ref.LEARNER, batch, rows=rows)
    want = jax.jit(jax.grad(lambda p: ref.plain_loss(p, batch, ref.LOSS, rows)))(ref.place_params())
    assert ref.distance(got, want) <= 2e-6
    assert metrics["tokens"] == batch.response_lens[rows].sum()

    outside = np.arange(ref.RESPONSE) >= batch.response_lens[:, None]
    outside[[0, 1]] = True
    end = batch.prompt_lens + batch.response_lens
    spoiled = dataclasses.replace(
        batch,
        tokens=np.where(np.arange(ref.PROMPT + ref.RESPONSE) >= end[:, None], 7, batch.tokens),
        old_logprobs=np.where(outside, -np.inf, batch.old_logprobs).astype(np.float32),
        advantages=np.where(outside, np.nan, batch.advantages).astype(np.float32),
    )
    again, _ = ref.gradient(ref.LEARNER, spoiled, rows=rows)
    jax.tree.map(np.testing.assert_array_equal, got, again)


def test_a_budget_divides_the_sum_over_the_rows_that_are_taken(mesh):
    """Seven of 12 tokens are taken, of two rows, one of them cut; the sum is divided by 9."""
    batch = dataclasses.replace(ref.host_batch(), response_lens=np.array([3, 0, 4, 0], np.int32))
    update_spec = dataclasses.replace(ref.LEARNER, loss_count=9)
    got, metrics = ref.gradient(update_spec, batch, included=batch.response_lens > 0)
    value, want = jax.jit(
        jax.value_and_grad(lambda p: ref.plain_loss(p, batch, ref.LOSS, [0, 2]) * 7 / 9)
    )(ref.place_params())
    assert ref.distance(got, want) <= 2e-6
    np.testing.assert_allclose(metrics["loss"], value, rtol=1e-5)
    assert metrics["tokens"] == 7


def test_a_row_counts_as_often_as_it_is_taken(make_mesh):
    """On four devices, against rows that are scored one by one on one device."""
    batch = ref.host_batch()
    rows = np.array([3, 2, 3, 3])
    with jax.set_mesh(make_mesh(2, 2, 1)):
        got, metrics = ref.gradient(ref.LEARNER, batch, rows=rows)
    with jax.set_mesh(make_mesh(1, 1, 1)):
        want = jax.jit(jax.grad(lambda p: ref.plain_loss(p, batch, ref.LOSS, rows)))(
            ref.place_params()
        )
    assert ref.distance(got, want) <= 2e-6
    assert metrics["tokens"] == batch.response_lens[rows].sum()


def _plain_values(trunk, head, batch: Batch, row: int):
    """V of the states before each token of a response, from a pass over this row alone."""
    first, count = batch.prompt_lens[row], batch.response_lens[row]
    hidden, _ = Transformer(ref.MODEL, trunk)(jnp.asarray(batch.tokens[row, : first + count])[None])
    hidden = jax.sharding.reshard(hidden, jax.P(None, None, None))
    return hidden[0, first - 1 : -1] @ head


@pytest.mark.parametrize("kind", ["head", "network"])
def test_a_critic_learns_beside_the_policy(mesh, kind):
    """Both gradients are those of policy loss + coef x value loss, written row by row."""
    rng = np.random.default_rng(8)
    critic = Critic(ref.GRADIENT, kind, coef=0.7, clip=0.3)
    update_spec = dataclasses.replace(ref.LEARNER, critic=critic)
    values, returns = rng.normal(0, 0.5, (2, ref.ROWS, ref.RESPONSE)).astype(np.float32)
    batch = dataclasses.replace(ref.host_batch(), values=values, returns=returns)
    state = init_policy_state(update_spec, ref.place_params())
    fresh = state.modules["critic"]
    assert not np.any(fresh.params["head"])
    start = fresh.params | {"head": put(rng.normal(size=8).astype(np.float32), None)}
    if kind == "network":  # it starts as the policy; here it has moved on
        start["decoder"] = jax.tree.map(lambda x: x + 0.1, start["decoder"])
    state = state.replace(critic=dataclasses.replace(fresh, params=start))

    def loss(params, critic):
        trunk, errors = critic.get("decoder", params), []
        for row in range(ref.ROWS):
            estimates = _plain_values(trunk, critic["head"], batch, row)
            old, target = (x[row, : len(estimates)] for x in (values, returns))
            clipped = jnp.clip(estimates, old - 0.3, old + 0.3)
            errors.append(jnp.maximum((estimates - target) ** 2, (clipped - target) ** 2) / 2)
        error = jnp.mean(jnp.concatenate(errors))
        return ref.plain_loss(params, batch, ref.LOSS, range(ref.ROWS)) + 0.7 * error, error

    placed = ref.on_mesh(batch)
    packed = ref.pack(placed, update_spec)
    estimates = critic_values(update_spec, state, packed)
    for row, n in enumerate(batch.response_lens):
        expected = _plain_values(
            start.get("decoder", ref.place_params()), start["head"], batch, row
        )
        np.testing.assert_allclose(estimates[row, :n], expected, rtol=1e-4, atol=1e-5)
    (_, error), want = jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))(
        ref.place_params(), start
    )
    state, metrics = update(update_spec, state, placed, packed)
    assert ref.distance(state.policy.opt_state, want[0]) <= 2e-6
    assert ref.distance(state.modules["critic"].opt_state, want[1]) <= 2e-6
    np.testing.assert_allclose(metrics["critic_loss"], error, rtol=1e-5)
    np.testing.assert_allclose(metrics["critic_grad_norm"], optax.tree.norm(want[1]), rtol=1e-5)
    plain = ref.gradient(ref.LEARNER, ref.host_batch())[1]
    np.testing.assert_allclose(metrics["loss"], plain["loss"], rtol=1e-5)


def test_a_batch_of_a_rollout(mesh):
    """Two prompts, two responses each, the second of which fills its slots."""
    slots = 4
    prompts = Prompts(
        tokens=np.array([[7, 8, 0], [9, 0, 0]], np.int32),
        lens=np.array([2, 1], np.int32),
        ids=np.zeros((2, 2), np.uint32),
        examples=(Example("0" * 16, "", "", "", {}),) * 2,
    )
    lens = np.array([1, slots, 1, 1], np.int32)
    tokens = np.where(
        np.arange(slots) < lens[:, None], np.arange(1, 5) + 4 * np.arange(4)[:, None], 0
    )
    tokens = tokens.astype(np.int32)
    scores = np.where(tokens > 0, -0.5 * tokens, 0).astype(np.float32)
    values = {f.name: scores * np.nan for f in dataclasses.fields(Tokens)}
    values |= {"ids": tokens, "policy_logprobs": scores}
    rollout = ref.on_mesh(Rollout(Tokens(**values), lens, prefix_lens=scores * np.nan))
    batch = make_batch(prompts, rollout)
    np.testing.assert_array_equal(batch.prompt_lens, [2, 2, 1, 1])
    np.testing.assert_array_equal(batch.response_lens, lens)
    np.testing.assert_array_equal(batch.old_logprobs, scores)
    np.testing.assert_array_equal(batch.advantages, np.zeros((4, slots)))
    assert batch.ref_logprobs is None
    want = np.zeros((4, 3 + slots), np.int32)
    for row, prompt in enumerate(([7, 8], [7, 8], [9], [9])):
        joined = [*prompt, *tokens[row]]
        want[row, : len(joined)] = joined
    np.testing.assert_array_equal(batch.tokens, want)


def test_the_gap_is_a_mean_over_response_tokens(mesh):
    batch = ref.host_batch()
    other = batch.old_logprobs + np.float32(0.25)
    other[np.arange(ref.RESPONSE) >= batch.response_lens[:, None]] = np.nan
    gap = logprob_gap(ref.on_mesh(batch), put(other, "batch", None))
    np.testing.assert_allclose(gap, 0.25, rtol=1e-5)

"""Online DPO: its gradient by autodiff of the papers' formula on whole responses."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import update_reference as ref
from advantage_cases import config
from loss_batches import MAX_LEN, PLAIN, make_batch
from small_runs import records, small_config

from specrl_jax import train as loop
from specrl_jax.algorithms.losses import policy_loss
from specrl_jax.recipes.online_dpo import best_and_worst, weigh_pairs

BETA = 0.3


def test_best_and_worst_by_hand():
    """The first of equals counts; equal rewards have no pair."""
    rewards = np.array([0, 1, 1, 0, 0.5, 0.5, 0.5, 0.5, 2, -1, 0, 3], np.float32)
    settings = config(4, True)
    expected = [-1, 1, 0, 0, 0, 0, 0, 0, 0, -1, 0, 1]
    np.testing.assert_array_equal(best_and_worst(rewards, settings), expected)


def _paper(logprobs, ref_logprobs, better: int, worse: int):
    """−log σ(β·(log π(y⁺) / π_ref(y⁺) − log π(y⁻) / π_ref(y⁻))) of whole responses."""
    margin = jnp.sum(logprobs[better]) - jnp.sum(ref_logprobs[better])
    margin -= jnp.sum(logprobs[worse]) - jnp.sum(ref_logprobs[worse])
    return -jnp.log(1 / (1 + jnp.exp(-BETA * margin)))


@pytest.mark.parametrize("aggregation", ["token", "constant"])
def test_the_gradient_is_that_of_the_formula_in_float64(mesh, aggregation):
    """Two groups of three, in each a response that is in no pair; ragged lengths."""
    logprobs, entropy, batch = make_batch(5, rows=7, slots=6)
    logprobs, entropy = logprobs[:6], entropy[:6]
    batch = jax.tree.map(lambda x: x[:6], batch)
    signs = np.array([0, 1, -1, -1, 0, 1])
    mask = np.asarray(batch.mask)
    batch = dataclasses.replace(batch, advantages=np.where(mask, signs[:, None], 0.0))
    settings = dataclasses.replace(
        PLAIN, objective="dpo", kl_coef=BETA, group_size=3, aggregation=aggregation
    )
    count = {"token": mask.sum(), "constant": 6 * MAX_LEN}[aggregation]

    def formula(x):
        x = jnp.where(mask, x, 0)
        ref = jnp.where(mask, batch.ref_logprobs, 0)
        return _paper(x, ref, better=1, worse=2) + _paper(x, ref, better=5, worse=3)

    with jax.enable_x64(True):
        weighed, sums = weigh_pairs(batch, jnp.asarray(logprobs), settings)
        got, _ = jax.grad(policy_loss, has_aux=True)(logprobs, entropy, weighed, settings)
        value, expected = jax.value_and_grad(formula)(logprobs)
        np.testing.assert_allclose(got * count, expected, rtol=1e-12)
        assert float(sums["policy/pair_loss"][1]) == 2
        np.testing.assert_allclose(sums["policy/pair_loss"][0], value, rtol=1e-12)


@pytest.mark.parametrize("shape", [(1, 1, 1), (2, 1, 1)])
@pytest.mark.parametrize("packing", ["rows", "trie"])
def test_pairs_that_lie_in_two_micro_batches_have_their_gradient(make_mesh, shape, packing):
    """Rows 0 to 3 are a group whose pair, 0 and 3, is in no micro-batch of two rows together."""
    batch = ref.host_batch(reference=True)
    signs = np.array([1, 0, 0, -1], np.float32)
    batch = dataclasses.replace(batch, advantages=np.tile(signs[:, None], (1, ref.RESPONSE)))
    loss = dataclasses.replace(
        ref.LOSS, objective="dpo", kl_coef=BETA, group_size=4, aggregation="constant"
    )
    spec = dataclasses.replace(ref.LEARNER, loss=loss, packing=packing)

    def formula(params):
        rows, refs = {}, {}
        for row in (0, 3):
            first = int(batch.prompt_lens[row])
            count = int(batch.response_lens[row])
            rows[row] = ref.row_scores(params, batch.tokens[row, : first + count], first, 0.8)[0]
            refs[row] = batch.ref_logprobs[row, :count]
        return _paper(rows, refs, better=0, worse=3)

    with jax.set_mesh(make_mesh(1, 1, 1)):
        value, expected = jax.jit(jax.value_and_grad(formula))(ref.place_params())
    with jax.set_mesh(make_mesh(*shape)):
        got, sums = ref.gradient(spec, batch)
    scaled = jax.tree.map(lambda x: np.asarray(x) * 4 * ref.LOSS.max_response_len, got)
    assert ref.distance(scaled, expected) <= 2e-6
    assert float(sums["policy/pair_loss"][1]) == 1
    np.testing.assert_allclose(sums["policy/pair_loss"][0], value, rtol=1e-5)


RUN = {
    "algorithm.objective": "dpo", "algorithm.advantage": "pair", "algorithm.kl_coef": 0.3,
    "algorithm.aggregation": "constant", "reward.name": "small_runs:score_first_letter",
    "reward.extract": "", "updates.mini_batch_size": 32, "updates.passes": 2, "train.steps": 2,
    "seed": 3, "updates.learning_rate": 1e-3,
}  # fmt: skip


def test_a_run_prefers_the_better_responses(mesh, tmp_path):
    loop.train(small_config(RUN), tmp_path)
    steps = records(tmp_path)[1:]
    # A group has at most one pair: 2 of its 8 rows.
    assert all(record["update/signal_fraction"] <= 1 / 4 for record in steps)
    # The first update has the reference's own weights: −log σ(0); the second has moved on.
    assert 0.6 * math.log(2) < steps[0]["policy/pair_loss"] < math.log(2)
    assert 0 < steps[0]["policy/pair_accuracy"] <= 1

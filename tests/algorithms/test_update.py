"""One optimizer step against a loss written down row by row, without padding, masks or batches."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from specrl_jax.algorithms.learner import (
    Critic,
    Learner,
    init_train_state,
)
from specrl_jax.algorithms.losses import LossConfig
from specrl_jax.algorithms.scoring import (
    critic_values,
    logprob_gap,
    logprobs,
    pack_rows,
)
from specrl_jax.algorithms.update import join, make_batch, update
from specrl_jax.models import transformer
from specrl_jax.models.config import ModelConfig
from specrl_jax.models.transformer import Transformer
from specrl_jax.packing import PACKINGS
from specrl_jax.rollout.acceptance import Ratio
from specrl_jax.rollout.engine.spec import ProgramSpec
from specrl_jax.rollout.generate import Noise, RolloutSpec, generate
from specrl_jax.rollout.sampling import SamplingConfig
from specrl_jax.sharding import put
from specrl_jax.types import Batch, Example, Prompts, Rollout

MODEL = ModelConfig(
    vocab_size=12, embed_dim=8, mlp_dim=12, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=4
)
LOSS = LossConfig(
    objective="clip", ratio="token", clip_low=0.2, clip_high=0.28, dual_clip=3.0,
    aggregation="token", kl_coef=0.0, kl_estimator="k3", entropy_coef=0.0,
    max_response_len=5,
)  # fmt: skip
# Hands the gradient out as its state and leaves the parameters alone.
GRADIENT = optax.GradientTransformation(
    lambda params: jax.tree.map(jnp.zeros_like, params),
    lambda grads, state, params=None: (jax.tree.map(jnp.zeros_like, grads), grads),
)
LEARNER = Learner(MODEL, LOSS, GRADIENT, temperature=0.8, logits_chunk=3, micro_batch_size=2)
ROWS, PROMPT, RESPONSE = 4, 4, 5


@functools.cache
def _host_params():
    rng = np.random.default_rng(0)
    return jax.tree.map(
        lambda shape: rng.normal(0, 0.4, shape).astype(np.float32),
        transformer.param_shapes(MODEL),
        is_leaf=lambda x: isinstance(x, tuple),
    )


def _params():
    return transformer.place_params(MODEL, _host_params())


def _host_batch(reference: bool = False, shared: bool = False) -> Batch:
    """Ragged rows; old log-probs some way off the policy's, so that every clip binds somewhere.

    shared: rows 0 and 1 share a prompt, rows 2 and 3 all but their last token.
    """
    rng = np.random.default_rng(1)
    prompt_lens = rng.integers(1, PROMPT + 1, ROWS).astype(np.int32)
    response_lens = np.array([5, 1, 4, 2], np.int32)
    tokens = np.zeros((ROWS, PROMPT + RESPONSE), np.int32)
    for row, count in enumerate(prompt_lens + response_lens):
        tokens[row, :count] = rng.integers(0, 12, count)
    if shared:
        prompt_lens[1], prompt_lens[3], response_lens[3] = prompt_lens[0], prompt_lens[2], 4
        tokens[1, : prompt_lens[1]] = tokens[0, : prompt_lens[0]]
        tokens[3] = tokens[2]
        tokens[3, prompt_lens[3] + 3] += 1
    shape = (ROWS, RESPONSE)
    return Batch(
        tokens=tokens,
        prompt_lens=prompt_lens,
        response_lens=response_lens,
        old_logprobs=rng.normal(-2.5, 1.0, shape).astype(np.float32),
        advantages=np.tile(rng.normal(size=(ROWS, 1)), (1, RESPONSE)).astype(np.float32),
        ref_logprobs=rng.normal(-2.5, 0.7, shape).astype(np.float32) if reference else None,
    )


def _placed(batch: Batch) -> Batch:
    return jax.tree.map(lambda x: put(x, "batch", *(None,) * (x.ndim - 1)), batch)


def _row_scores(params, tokens, first: int, temperature: float):
    """Log-probs [n] and entropies [n] of tokens[first:], from a pass over this row alone."""
    model = Transformer(MODEL, params)
    logits = model.logits(model(jnp.asarray(tokens)[None])[0])
    logits = jax.sharding.reshard(logits, jax.P(None, None, None))
    log_p = jax.nn.log_softmax(logits[0, first - 1 : -1] / temperature)
    taken = jnp.sum(log_p * np.eye(MODEL.vocab_size)[tokens[first:]], axis=-1)
    return taken, -jnp.sum(jnp.exp(log_p) * log_p, axis=-1)


def _plain_loss(params, batch: Batch, settings: LossConfig, rows) -> jax.Array:
    """arXiv 2402.03300, eq. 3 with DAPO's two clips and the dual clip, token by token."""
    row_sums, counts = [], []
    for b in rows:
        first, count = batch.prompt_lens[b], batch.response_lens[b]
        scores, spread = _row_scores(params, batch.tokens[b, : first + count], first, 0.8)
        terms = []
        for j in range(count):
            advantage = batch.advantages[b, j]
            ratio = jnp.exp(scores[j] - batch.old_logprobs[b, j])
            clipped = jnp.clip(ratio, 1 - settings.clip_low, 1 + settings.clip_high)
            term = -jnp.minimum(ratio * advantage, clipped * advantage)
            if settings.dual_clip and advantage < 0:
                term = jnp.minimum(term, -settings.dual_clip * advantage)
            if settings.kl_coef:
                d = batch.ref_logprobs[b, j] - scores[j]
                kl = {"k1": -d, "k2": d**2 / 2, "k3": jnp.exp(d) - d - 1}[settings.kl_estimator]
                term += settings.kl_coef * kl
            terms.append(term - settings.entropy_coef * spread[j])
        row_sums.append(sum(terms))
        counts.append(int(count))
    if settings.aggregation == "token":
        return sum(row_sums) / sum(counts)
    return sum(s / n for s, n in zip(row_sums, counts)) / len(counts)


def _distance(one, two) -> float:
    """‖one − two‖ / ‖two‖ over all leaves."""
    gap = jax.tree.map(lambda a, b: np.asarray(a, np.float64) - np.asarray(b, np.float64), one, two)
    norm = lambda tree: np.sqrt(sum(np.sum(np.square(x)) for x in jax.tree.leaves(tree)))  # noqa: E731
    return norm(gap) / norm(jax.tree.map(np.asarray, two))


def _pack(batch: Batch, learner: Learner = LEARNER, rows=range(ROWS), included=None):
    return pack_rows(learner, batch, np.array(rows), included)


def _gradient(learner: Learner, batch: Batch, **packed):
    state = init_train_state(learner, _params())
    batch = _placed(batch)
    state, metrics = update(learner, state, batch, _pack(batch, learner, **packed))
    return state.opt_state, metrics


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"aggregation": "sequence", "dual_clip": 0.0, "kl_coef": 0.5, "kl_estimator": "k2"},
        {"kl_coef": 0.5, "kl_estimator": "k3", "entropy_coef": 0.1},
    ],
    ids=str,
)
def test_the_gradient_is_that_of_the_formula(mesh, changes):
    settings = dataclasses.replace(LOSS, **changes)
    batch = _host_batch(reference=bool(settings.kl_coef))
    learner = dataclasses.replace(LEARNER, loss=settings)
    got, metrics = _gradient(learner, batch)
    value, want = jax.jit(
        jax.value_and_grad(lambda p: _plain_loss(p, batch, settings, range(ROWS)))
    )(_params())
    assert _distance(got, want) <= 2e-6
    np.testing.assert_allclose(metrics["loss"], value, rtol=1e-5)
    np.testing.assert_allclose(metrics["grad_norm"], optax.tree.norm(want), rtol=1e-5)
    assert metrics["tokens"] == batch.response_lens.sum()
    assert ("kl" in metrics) == bool(settings.kl_coef)
    assert 0 < metrics["clip_fraction"] < metrics["tokens"]


@pytest.mark.parametrize("packing", PACKINGS)
@pytest.mark.parametrize("size", [0, 1, 2])
def test_packed_rows_give_the_gradient_of_rows_alone(mesh, packing, size):
    """Rows 0 and 1 share their prompt, row 3 is row 2 with another last token."""
    batch = _host_batch(shared=True)
    learner = dataclasses.replace(LEARNER, packing=packing, micro_batch_size=size)
    got, metrics = _gradient(learner, batch)
    value, want = jax.jit(jax.value_and_grad(lambda p: _plain_loss(p, batch, LOSS, range(ROWS))))(
        _params()
    )
    assert _distance(got, want) <= 2e-6
    np.testing.assert_allclose(metrics["loss"], value, rtol=1e-5)
    assert metrics["tokens"] == batch.response_lens.sum()


def _random_rows(seed: int) -> Batch:
    """Two groups: a whole row twice, a row and its beginning, an empty one, full ones."""
    rng, size = np.random.default_rng(seed), (8, PROMPT + RESPONSE)
    prompt_lens = np.repeat(rng.integers(1, PROMPT + 1, 2), 4).astype(np.int32)
    response_lens = rng.integers(1, RESPONSE + 1, 8).astype(np.int32)
    response_lens[[3, 5, 6]] = 0, RESPONSE, RESPONSE
    tokens = rng.integers(0, 3, size).astype(np.int32)  # of three, so that beginnings are shared
    columns = np.arange(size[1])
    shared = columns < prompt_lens[:, None]
    tokens = np.where(shared, tokens[np.arange(8) // 4 * 4], tokens)
    tokens[1], tokens[4] = tokens[0], tokens[5]
    response_lens[1] = response_lens[0]
    tokens[columns >= (prompt_lens + response_lens)[:, None]] = 0
    names = "old_logprobs", "advantages", "ref_logprobs", "values", "returns"
    floats = rng.normal(scale=0.5, size=(5, 8, RESPONSE)).astype(np.float32)
    return Batch(tokens, prompt_lens, response_lens, **dict(zip(names, floats)))


ALGORITHMS = {
    "GRPO": {"kl_coef": 0.1},
    "DAPO": {"clip_high": 0.4},
    "Dr. GRPO": {"aggregation": "constant", "dual_clip": 0.0},
    "GSPO": {"ratio": "sequence", "aggregation": "sequence"},
    "CISPO": {"objective": "cispo", "entropy_coef": 0.1},
    "PPO, head": {"critic": "head"},
    "PPO, network": {"critic": "network"},
}


@pytest.mark.parametrize("name", ALGORITHMS)
def test_tries_on_eight_devices_give_the_gradient_of_rows_on_one(make_mesh, name):
    changes = dict(ALGORITHMS[name])
    kind = changes.pop("critic", None)
    critic = kind and Critic(kind, coef=0.7, clip=0.3, optimizer=GRADIENT)
    loss = dataclasses.replace(LOSS, **changes)
    of_rows = dataclasses.replace(LEARNER, loss=loss, critic=critic, packing="rows")
    tries = dataclasses.replace(of_rows, packing="trie", micro_batch_size=16)

    def results(learner, shape):
        """(gradients, losses, log-probs, values) of every seed."""
        with jax.set_mesh(make_mesh(*shape)):
            found = []
            for seed in range(3):
                batch = _random_rows(seed)
                if not loss.kl_coef:
                    batch = dataclasses.replace(batch, ref_logprobs=None)
                if not critic:
                    batch = dataclasses.replace(batch, values=None, returns=None)
                state, batch = init_train_state(learner, _params()), _placed(batch)
                if critic:
                    head = put(np.random.default_rng(8).normal(size=8).astype(np.float32), None)
                    state = dataclasses.replace(state, critic=state.critic | {"head": head})
                packed = _pack(batch, learner, range(8))
                read = logprobs(learner, state.params, packed)
                values = critic_values(learner, state, packed) if critic else None
                state, metrics = update(learner, state, batch, packed)
                gradients = state.opt_state, state.critic_opt_state
                found.append(jax.device_get((gradients, metrics["loss"], read, values)))
            return found

    expected = results(of_rows, (1, 1, 1))
    for got, want in zip(results(tries, (4, 2, 1)), expected, strict=True):
        assert _distance(got[0], want[0]) <= 1e-5
        for mine, theirs in zip(jax.tree.leaves(got[1:]), jax.tree.leaves(want[1:]), strict=True):
            np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=1e-5)


def test_rows_that_are_left_out_count_in_the_mean(mesh):
    """Rows 1 and 2 have no advantage: the gradient and the loss are those of all rows."""
    batch = _host_batch()
    advantages = batch.advantages.copy()
    advantages[[1, 2]] = 0
    batch = dataclasses.replace(batch, advantages=advantages)
    for aggregation in ("token", "sequence"):
        settings = dataclasses.replace(LOSS, aggregation=aggregation)
        learner = dataclasses.replace(LEARNER, loss=settings)
        all_rows, _ = _gradient(learner, batch)
        got, metrics = _gradient(learner, batch, included=np.array([1, 0, 0, 1], bool))
        assert _distance(got, all_rows) <= 2e-6
        value = _plain_loss(_params(), batch, settings, range(ROWS))
        np.testing.assert_allclose(metrics["loss"], value, rtol=1e-5)
        assert metrics["tokens"] == batch.response_lens[[0, 3]].sum()


def test_without_any_row_to_compute_the_gradient_is_0(mesh):
    got, metrics = _gradient(LEARNER, _host_batch(), included=np.zeros(ROWS, bool))
    assert not any(np.any(x) for x in jax.tree.leaves(got))
    assert metrics["loss"] == metrics["tokens"] == metrics["grad_norm"] == 0


def test_only_the_rows_of_the_mini_batch_count(mesh):
    """Its normalizer too is its own; what lies behind a row's end reaches nothing."""
    batch, rows = _host_batch(), np.array([3, 2])
    got, metrics = _gradient(LEARNER, batch, rows=rows)
    want = jax.jit(jax.grad(lambda p: _plain_loss(p, batch, LOSS, rows)))(_params())
    assert _distance(got, want) <= 2e-6
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
    again, _ = _gradient(LEARNER, spoiled, rows=rows)
    jax.tree.map(np.testing.assert_array_equal, got, again)


def _plain_values(trunk, head, batch: Batch, row: int):
    """V of the states before each token of a response, from a pass over this row alone."""
    first, count = batch.prompt_lens[row], batch.response_lens[row]
    hidden, _ = Transformer(MODEL, trunk)(jnp.asarray(batch.tokens[row, : first + count])[None])
    hidden = jax.sharding.reshard(hidden, jax.P(None, None, None))
    return hidden[0, first - 1 : -1] @ head


@pytest.mark.parametrize("kind", ["head", "network"])
def test_a_critic_learns_beside_the_policy(mesh, kind):
    """Both gradients are those of policy loss + coef x value loss, written row by row."""
    rng = np.random.default_rng(8)
    critic = Critic(kind, coef=0.7, clip=0.3, optimizer=GRADIENT)
    learner = dataclasses.replace(LEARNER, critic=critic)
    values, returns = rng.normal(0, 0.5, (2, ROWS, RESPONSE)).astype(np.float32)
    batch = dataclasses.replace(_host_batch(), values=values, returns=returns)
    state = init_train_state(learner, _params())
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
        return _plain_loss(params, batch, LOSS, range(ROWS)) + 0.7 * error, error

    placed = _placed(batch)
    packed = _pack(placed, learner)
    estimates = critic_values(learner, state, packed)
    for row, n in enumerate(batch.response_lens):
        expected = _plain_values(start.get("decoder", _params()), start["head"], batch, row)
        np.testing.assert_allclose(estimates[row, :n], expected, rtol=1e-4, atol=1e-5)
    (_, error), want = jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True))(
        _params(), start
    )
    state, metrics = update(learner, state, placed, packed)
    assert _distance(state.opt_state, want[0]) <= 2e-6
    assert _distance(state.critic_opt_state, want[1]) <= 2e-6
    np.testing.assert_allclose(metrics["critic_loss"], error, rtol=1e-5)
    np.testing.assert_allclose(metrics["critic_grad_norm"], optax.tree.norm(want[1]), rtol=1e-5)
    plain = _gradient(LEARNER, _host_batch())[1]
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
    batch = _placed(dataclasses.replace(_host_batch(), values=values, returns=returns))
    packed = _pack(batch, learner)
    start = jax.device_get(init_train_state(learner, _params()))
    state = init_train_state(learner, _params())
    for _ in range(4):
        state, metrics = update(learner, state, batch, packed, policy_frozen=True)
    frozen = jax.device_get(state)
    jax.tree.map(np.testing.assert_array_equal, frozen.params, start.params)
    jax.tree.map(np.testing.assert_array_equal, frozen.opt_state, start.opt_state)
    assert not np.array_equal(frozen.critic["head"], start.critic["head"])
    assert metrics["grad_norm"] > 0

    fresh = dataclasses.replace(init_train_state(learner, _params()), critic=state.critic)
    fresh = jax.tree.map(jnp.copy, fresh)
    after, _ = update(learner, state, batch, packed)
    expected, _ = update(learner, fresh, batch, packed)
    jax.tree.map(np.testing.assert_array_equal, after.params, expected.params)
    assert _distance(after.params, start.params) > 0.01


def test_responses_stand_right_behind_their_prompts(mesh):
    """Worked rows: prompts "7", "7 8" and "7 8 9", responses cut to two slots."""
    prompts = np.array([[7, 0, 0], [7, 8, 0], [7, 8, 9]], np.int32)
    responses = np.array([[1, 2, 0], [3, 0, 0], [4, 5, 0]], np.int32)
    lens = put(np.array([1, 2, 3], np.int32), "batch")
    got = join(put(prompts, "batch", None), lens, put(responses, "batch", None), response_slots=2)
    np.testing.assert_array_equal(got, [[7, 1, 2, 0, 0], [7, 8, 3, 0, 0], [7, 8, 9, 4, 5]])


@pytest.mark.parametrize(("longest", "slots"), [(1, 2), (2, 2), (3, 4), (4, 4)])
def test_a_batch_of_a_rollout(mesh, longest, slots):
    """Two prompts, two responses each; cut to the shortest length that holds them all."""
    prompts = Prompts(
        tokens=np.array([[7, 8, 0], [9, 0, 0]], np.int32),
        lens=np.array([2, 1], np.int32),
        ids=np.zeros((2, 2), np.uint32),
        examples=(Example("0" * 16, "", "", "", {}),) * 2,
    )
    lens = np.array([1, longest, 1, 1], np.int32)
    tokens = np.where(np.arange(4) < lens[:, None], np.arange(1, 5) + 4 * np.arange(4)[:, None], 0)
    tokens = tokens.astype(np.int32)
    scores = np.where(tokens > 0, -0.5 * tokens, 0).astype(np.float32)
    values = {f.name: scores for f in dataclasses.fields(Rollout)} | {
        "tokens": tokens,
        "lens": lens,
        "prefix_lens": lens * 0,
        "sampling_logprobs": scores * 0 - 9,  # never the old log-probs
    }
    rollout = _placed(Rollout(**values))
    batch = make_batch(prompts, rollout, lengths=(2, 4))
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
    batch, params = _host_batch(shared=True), _params()
    got = np.asarray(logprobs(LEARNER, params, _pack(_placed(batch))))
    ends = batch.prompt_lens + batch.response_lens
    rows = [batch.tokens[b, : ends[b]] for b in range(ROWS)]
    starts = batch.prompt_lens
    every = jax.jit(lambda p: [_row_scores(p, r, s, 0.8)[0] for r, s in zip(rows, starts)])
    for b, want in enumerate(every(params)):
        np.testing.assert_allclose(got[b, : len(want)], want, rtol=1e-5, atol=1e-5)


def test_the_gap_is_a_mean_over_response_tokens(mesh):
    batch = _host_batch()
    other = batch.old_logprobs + np.float32(0.25)
    other[np.arange(RESPONSE) >= batch.response_lens[:, None]] = np.nan
    gap = logprob_gap(_placed(batch), put(other, "batch", None))
    np.testing.assert_allclose(gap, 0.25, rtol=1e-5)


@pytest.fixture
def fresh(mesh):
    """(learner, parameters, batch) of a rollout that the parameters have just made."""
    params, sampling = _params(), SamplingConfig(0.8, top_k=6)
    setup = ProgramSpec(MODEL, sampling, Ratio(), (1,), 0, RESPONSE, 3)
    plan = RolloutSpec(setup, PROMPT, group_size=2, row_buckets=2, cache_lengths=1)
    host = _host_batch()
    inside = np.arange(PROMPT) < host.prompt_lens[:, None]
    prompts = Prompts(
        tokens=np.where(inside, host.tokens[:, :PROMPT], 0),
        lens=host.prompt_lens,
        ids=np.arange(2 * ROWS, dtype=np.uint32).reshape(ROWS, 2),
        examples=(Example("0" * 16, "", "", "", {}),) * ROWS,
    )
    weights = jax.jit(transformer.rollout_weights, static_argnums=0)(MODEL, params)
    rollout = generate(plan, weights, prompts, Noise(jax.random.key(0), 1)).rollout
    batch = make_batch(prompts, rollout, lengths=(RESPONSE,))
    advantages = np.tile(np.linspace(-1, 1, 2 * ROWS, dtype=np.float32)[:, None], (1, RESPONSE))
    return LEARNER, params, dataclasses.replace(batch, advantages=put(advantages, "batch", None))


def test_the_rollouts_logprobs_are_the_updates(fresh):
    learner, params, batch = fresh
    got = logprobs(learner, params, _pack(batch, learner, range(2 * ROWS)))
    mask = np.arange(RESPONSE) < np.asarray(batch.response_lens)[:, None]
    one, two = (np.where(mask, x, 0) for x in (got, batch.old_logprobs))
    np.testing.assert_allclose(one, two, rtol=1e-5, atol=1e-5)
    assert np.any(one)
    assert logprob_gap(batch, got) < 1e-6


def test_before_the_first_update_nothing_is_clipped_and_the_kl_is_0(fresh):
    learner, params, batch = fresh
    reference = logprobs(learner, params, _pack(batch, learner, range(2 * ROWS)))
    batch = dataclasses.replace(batch, ref_logprobs=reference)
    learner = dataclasses.replace(learner, loss=dataclasses.replace(LOSS, kl_coef=0.1))
    state = init_train_state(learner, params)
    _, sums = update(learner, state, batch, _pack(batch, learner, range(2 * ROWS)))
    tokens = float(sums["tokens"])
    assert abs(float(sums["kl"])) / tokens < 1e-7
    assert float(sums["clip_fraction"]) == 0
    np.testing.assert_allclose(sums["ratio_mean"] / tokens, 1, rtol=1e-6)
    lens = np.asarray(batch.response_lens)
    per_row = np.asarray(batch.advantages)[:, 0]
    np.testing.assert_allclose(sums["loss"], -np.sum(per_row * lens) / lens.sum(), atol=1e-6)

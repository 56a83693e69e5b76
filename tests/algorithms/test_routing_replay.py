"""Updates that replay the experts of the rollout, against forwards whose routing is forced."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import rollout_reference as ref
import update_reference as updates
from small_models import random_params
from small_runs import records, small_config

from specrl_jax import train as loop
from specrl_jax.algorithms.losses import policy_loss
from specrl_jax.algorithms.scoring import logprobs
from specrl_jax.algorithms.update import make_batch, update
from specrl_jax.algorithms.update_spec import init_policy_state
from specrl_jax.models import experts
from specrl_jax.models.layers import DecoderLayer, Place, rms_norm, rope_tables
from specrl_jax.models.transformer import Transformer, place_params

EXPERTS = {"num_experts": 6, "experts_per_token": 2, "norm_topk": True, "num_layers": 2}
MIXTURE = ref.MODEL.replace(**EXPERTS)
LEARNER = dataclasses.replace(
    updates.LEARNER, model=updates.MODEL.replace(num_kv_heads=2, **EXPERTS)
)


def forced_route(given_Mk):
    """A router with given choices, except for -1; its weights are those of the definition."""

    def route(x_MD, router_DE, chosen, norm, replayed):
        assert norm
        assert replayed is None
        probs = jax.nn.softmax(x_MD.astype(jnp.float32) @ router_DE, axis=-1)
        _, own = jax.lax.top_k(probs, chosen)
        ids = jnp.where(given_Mk < 0, own, given_Mk)
        weights = jnp.sum(jax.nn.one_hot(ids, probs.shape[-1]) * probs[:, None], axis=-1)
        return probs, weights / weights.sum(axis=1, keepdims=True), ids

    return route


def forced_logprobs(config, params, batch, routing):
    """Log-probs [B, R] by an unpacked pass, layer by layer, with the experts that rows kept."""
    first = batch.prompt_lens[:, None] - 1 + np.arange(routing.shape[1])  # [B, R], who predicts
    rows = np.arange(len(first))[:, None]
    given = np.full((*batch.tokens.shape, *routing.shape[2:]), -1)
    given[rows, first] = routing.astype(int) - 1
    model = Transformer(config, params)
    x = model.lookup(batch.tokens)
    rope = rope_tables(jnp.arange(batch.tokens.shape[1])[None], config)
    for layer in range(config.num_layers):
        own = {name: array[layer] for name, array in params["layers"].items()}
        with pytest.MonkeyPatch.context() as patch:
            own_given = given[:, :, layer].reshape(-1, given.shape[-1])
            patch.setattr(experts, "route", forced_route(own_given))
            x, *_ = DecoderLayer(config, own)(x, rope, Place())
    logits = model.logits(rms_norm(x, params["final_norm"], config)) / LEARNER.temperature
    log_p = jax.nn.log_softmax(jax.sharding.reshard(logits, jax.P(None, None, None)))
    return log_p[rows, first, batch.tokens[rows, np.minimum(first + 1, batch.tokens.shape[1] - 1)]]


def random_case():
    """Rows that share prefixes, and any experts for them; for some tokens none are known."""
    batch = updates.host_batch(shared=True)
    batch = jax.tree.map(lambda x: np.concatenate([x, x]), batch)
    rng = np.random.default_rng(3)
    kept = (len(batch.tokens), updates.RESPONSE, EXPERTS["num_layers"], EXPERTS["num_experts"])
    routing = np.argsort(rng.random(kept), axis=-1)[..., :2].astype(np.uint8) + 1
    routing[0, 2] = 0
    routing[1, 0] = routing[0, 0]  # of the prompt's last token, which both rows have
    routing[3] = routing[2]
    routing[4:] = routing[:4]
    return batch, routing


@pytest.mark.parametrize(
    ("shape", "packing"),
    [
        ((1, 1, 1), "trie"),
        ((2, 2, 2), "trie"),
        *(pytest.param((1, 1, 1), x, marks=pytest.mark.slow) for x in ("sequences", "rows")),
    ],
)
def test_log_probs_and_gradient_are_those_of_the_routing_that_is_replayed(
    make_mesh, shape, packing
):
    """Any experts; the router's own where none are known: of prompts, of last tokens."""
    spec = dataclasses.replace(LEARNER, packing=packing)
    config = spec.model
    batch, routing = random_case()
    with jax.set_mesh(make_mesh(*shape)):
        params = place_params(config, random_params(config, 0.4))
        placed = updates.on_mesh(dataclasses.replace(batch, routing=routing))
        packed = updates.pack(placed, spec, rows=range(8))
        got = np.asarray(logprobs(spec, params, packed, None, placed.routing))
        free = np.asarray(logprobs(spec, params, packed))
        state, _ = update(spec, init_policy_state(spec, params), placed, packed)
        grads = jax.device_get(state.policy.opt_state)
    with jax.set_mesh(make_mesh(1, 1, 1)):
        params = place_params(config, random_params(config, 0.4))

        def loss(params):
            scores = forced_logprobs(config, params, batch, routing)
            return policy_loss(scores, scores * 0, batch, spec.loss)[0], scores

        expected, want = jax.jit(jax.grad(loss, has_aux=True))(params)
    here = np.asarray(batch.mask)
    np.testing.assert_allclose(got[here], want[here], atol=3e-6)
    assert np.all(np.max(np.abs(free - want), axis=1, where=here, initial=0) > 1e-2)
    assert updates.distance(grads, expected) <= 1e-5


CASES = {
    "plain": {},
    "drafts that are verified": {"drafts": True},
    "few rows": {"drafts": True, "max_rows": 8},
    "tree": {"accept": "match", "tree": ref.TREE, "max_width": 3},
}


@pytest.mark.parametrize(
    "case", [pytest.param(x, marks=[pytest.mark.slow] * (x in ("plain", "tree"))) for x in CASES]
)
def test_a_rollout_keeps_the_experts_of_each_token(mesh, case):
    """Experts are those of a pass over the whole row; an update in float32 is as without them."""
    options = dict(CASES[case])
    drafted = options.pop("drafts", False)
    spec = ref.make_spec(MIXTURE, slots=10, keeps_routing=True, **options)
    prompts = ref.random_prompts(4)
    params, weights = ref.policy(0.0, MIXTURE)
    inputs = {}
    if drafted:
        inputs = {"drafts": ref.old_drafts(spec, prompts, 0.1), "log_lenience": 0.2}
    if spec.draft_source:
        older, _ = ref.run(spec, weights, prompts)
        inputs["history"] = ref.history_of(spec, older.tokens.ids, older.lens)
    rollout, stats = ref.run(spec, weights, prompts, step=1, **inputs)
    off, _ = ref.run(
        dataclasses.replace(spec, keeps_routing=False), weights, prompts, step=1, **inputs
    )
    assert off.tokens.routing is None
    for name, array in ref.fields_of(off).items():
        np.testing.assert_array_equal(ref.fields_of(rollout)[name], array)
    assert not drafted or np.max(rollout.prefix_lens) > 0
    assert spec.draft_source is None or stats.drafted_tokens > 0
    run = jax.jit(lambda tokens: Transformer(MIXTURE, params)(tokens, gives_routing=True)[1][1])
    batch = make_batch(prompts, rollout)
    chosen = np.asarray(run(batch.tokens))
    kept = np.asarray(rollout.tokens.routing)
    assert kept.dtype == np.uint8
    lens = np.asarray(batch.prompt_lens), np.asarray(rollout.lens)
    for row, (first, count) in enumerate(zip(*lens)):
        want = chosen[row, first - 1 : first - 1 + count]
        np.testing.assert_array_equal(np.sort(kept[row, :count]), np.sort(want))
        assert not kept[row, count:].any()
    learner = dataclasses.replace(LEARNER, model=MIXTURE)
    packed = updates.pack(batch, learner, rows=range(len(batch.tokens)))
    free = logprobs(learner, params, packed)
    replayed = logprobs(learner, params, packed, None, batch.routing)
    np.testing.assert_allclose(replayed, free, atol=1e-6)


# Runs -----------------------------------------------------------------------------------------

MICRO = {
    "model.family": "qwen3_moe", "model.num_layers": 2, "updates.old_logprobs": "recompute",
    "algorithm.kl_coef": 0.01, "rollout.draft": "previous",
}  # fmt: skip
RUNS = {
    "drafts": {},
    "critic": {"critic.kind": "head", "updates.old_logprobs": "rollout"},
    "solutions": {"algorithm.solution_coef": 0.1, "data.solution_field": "answer"},
    "partial": {"rollout.partial": 2, "updates.old_logprobs": "rollout", "rollout.draft": "none"},
    "forks": {"treepo.segment": 2, "rollout.draft": "none"},
}


@pytest.mark.slow
@pytest.mark.parametrize("case", RUNS)
def test_a_run_in_float32_is_as_without_replay(mesh, tmp_path, case):
    """Up to the first step whose updates change the router; then experts may differ."""
    steps = []
    for replay in (False, True):
        changes = MICRO | RUNS[case] | {"updates.replay_routing": replay}
        changes["updates.learning_rate"] = 1e-5
        loop.train(small_config(changes), tmp_path / str(replay))
        steps.append(records(tmp_path / str(replay)))
    changed = next(i for i, x in enumerate(steps[0]) if x.get("update/grad_norm", 0) > 1e-3)
    for one, two in zip(*(x[: changed + 1] for x in steps), strict=True):
        for name in (x for x in one if x.startswith(("policy/loss", "update/grad", "reward/mean"))):
            assert two[name] == pytest.approx(one[name], abs=1e-4), name


@pytest.mark.slow
def test_replay_lowers_the_gap_of_bfloat16_rollouts(mesh, tmp_path):
    """In the first step: both runs have the same weights and tokens there."""
    gaps = {}
    for replay in (False, True):
        changes = MICRO | {"updates.replay_routing": replay, "model.dtype": "bfloat16"}
        loop.train(small_config(changes), tmp_path / str(replay))
        gaps[replay] = records(tmp_path / str(replay))[1]["policy/rollout_train_logprob_gap"]
    assert 0 < gaps[True] < gaps[False]


def test_a_dense_model_has_no_routing_to_replay(mesh, tmp_path):
    rule = "updates.replay_routing needs a mixture of experts, family qwen3 is not one; add "
    with pytest.raises(ValueError, match=rule + "--config.updates.replay_routing=False"):
        loop.train(small_config({"updates.replay_routing": True}), tmp_path)

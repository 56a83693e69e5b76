"""Rows packed as tries, or left out, give the gradient of all rows alone, for every algorithm."""

import dataclasses

import jax
import numpy as np
import pytest
import update_reference as ref
from small_models import random_params

from specrl_jax.algorithms.scoring import critic_values, logprobs
from specrl_jax.algorithms.update import update
from specrl_jax.algorithms.update_spec import Critic, init_policy_state
from specrl_jax.models import transformer
from specrl_jax.packing import PACKINGS
from specrl_jax.sharding import put
from specrl_jax.types import Batch

WINDOW = ref.MODEL.replace(
    num_layers=3,
    sliding_window=2,
    local_layers=(True, False, True),
    rope_local_theta=50.0,
    attn_softcap=2.0,
)


@pytest.mark.parametrize("packing", sorted(set(PACKINGS) - {"rows"}))
def test_packed_rows_of_local_layers_give_the_gradient_of_padded_rows(mesh, packing):
    """Slots of a trie lie further apart than the positions that the window counts."""
    batch = ref.on_mesh(ref.host_batch(shared=True))
    params = random_params(WINDOW, 0.4)

    def gradient_by(packing: str):
        spec = dataclasses.replace(ref.LEARNER, model=WINDOW, packing=packing)
        state = init_policy_state(spec, transformer.place_params(WINDOW, params))
        state, sums = update(spec, state, batch, ref.pack(batch, spec))
        return state.policy.opt_state, sums["loss"]

    got, loss = gradient_by(packing)
    want, padded_loss = gradient_by("rows")
    assert ref.distance(got, want) <= 2e-6
    np.testing.assert_allclose(loss, padded_loss, rtol=1e-5)


def _random_rows(seed: int) -> Batch:
    """Two groups: a whole row twice, a row and its prefix, an empty one, full ones."""
    rng, size = np.random.default_rng(seed), (8, ref.PROMPT + ref.RESPONSE)
    prompt_lens = np.repeat(rng.integers(1, ref.PROMPT + 1, 2), 4).astype(np.int32)
    response_lens = rng.integers(1, ref.RESPONSE + 1, 8).astype(np.int32)
    response_lens[[3, 5, 6]] = 0, ref.RESPONSE, ref.RESPONSE
    tokens = rng.integers(0, 3, size).astype(np.int32)  # of three, so that beginnings are shared
    columns = np.arange(size[1])
    shared = columns < prompt_lens[:, None]
    tokens = np.where(shared, tokens[np.arange(8) // 4 * 4], tokens)
    tokens[1], tokens[4] = tokens[0], tokens[5]
    response_lens[1] = response_lens[0]
    tokens[columns >= (prompt_lens + response_lens)[:, None]] = 0
    names = "old_logprobs", "advantages", "ref_logprobs", "values", "returns"
    floats = rng.normal(scale=0.5, size=(5, 8, ref.RESPONSE)).astype(np.float32)
    return Batch(tokens, prompt_lens, response_lens, **dict(zip(names, floats)))


def _some_support(batch: Batch, seed: int) -> np.ndarray:
    """Tokens that a sampler allowed, int32 [B, R, 4]: by the tokens before, with the token or not.
    Of 12 tokens some have two ids, others none."""
    support = np.full((*batch.advantages.shape, 4), -1, np.int32)
    for row, first in enumerate(batch.prompt_lens):
        for column in range(batch.response_lens[row]):
            before = batch.tokens[row, : first + column].tolist()
            rng = np.random.default_rng([seed, *before])
            count = rng.integers(0, 5)
            support[row, column, :count] = rng.permutation(12)[:count]
    return support


ALGORITHMS = {
    "GRPO": {"kl_coef": 0.1, "entropy_coef": 0.1},
    "GSPO": {"ratio": "sequence", "aggregation": "sequence"},
    "PPO": {"critic": "network"},
    "sampling mask": {"keeps_mask": True},
}


@pytest.mark.parametrize(
    "name",
    ALGORITHMS,
)
def test_tries_on_eight_devices_give_the_gradient_of_rows_on_one(make_mesh, name):
    changes = dict(ALGORITHMS[name])
    kind = changes.pop("critic", None)
    keeps_mask = changes.pop("keeps_mask", False)
    critic = kind and Critic(ref.GRADIENT, kind, coef=0.7, clip=0.3)
    loss = dataclasses.replace(ref.LOSS, **changes)
    rows = dataclasses.replace(ref.LEARNER, loss=loss, critic=critic, packing="rows")
    tries = dataclasses.replace(rows, packing="trie")

    def results(update_spec, shape):
        """Return (gradients, loss, log-probs, values) of every seed."""
        by_seed = []
        with jax.set_mesh(make_mesh(*shape)):
            for seed in range(2):
                batch = _random_rows(seed)
                if not loss.kl_coef:
                    batch = dataclasses.replace(batch, ref_logprobs=None)
                if not critic:
                    batch = dataclasses.replace(batch, values=None, returns=None)
                if keeps_mask:
                    batch = dataclasses.replace(batch, support=_some_support(batch, seed))
                state, batch = (
                    init_policy_state(update_spec, ref.place_params()),
                    ref.on_mesh(batch),
                )
                if critic:
                    head = put(np.random.default_rng(8).normal(size=8).astype(np.float32), None)
                    module = state.modules["critic"]
                    module = dataclasses.replace(module, params=module.params | {"head": head})
                    state = state.replace(critic=module)
                packed = ref.pack(batch, update_spec, range(8))
                read = logprobs(update_spec, state.policy.params, packed, batch.support)
                values = critic_values(update_spec, state, packed) if critic else None
                state, metrics = update(update_spec, state, batch, packed)
                gradients = {name: module.opt_state for name, module in state.modules.items()}
                by_seed.append(jax.device_get((gradients, metrics["loss"], read, values)))
        return by_seed

    expected = results(rows, (1, 1, 1))
    for got, want in zip(results(tries, (4, 2, 1)), expected, strict=True):
        assert ref.distance(got[0], want[0]) <= 1e-5
        for mine, theirs in zip(jax.tree.leaves(got[1:]), jax.tree.leaves(want[1:]), strict=True):
            np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=1e-5)


def test_rows_that_are_left_out_count_in_the_mean(mesh):
    """Rows 1 and 2 have no advantage: the gradient and the loss are those of all rows."""
    batch = ref.host_batch()
    advantages = batch.advantages.copy()
    advantages[[1, 2]] = 0
    batch = dataclasses.replace(batch, advantages=advantages)
    for aggregation in ("token", "sequence"):
        settings = dataclasses.replace(ref.LOSS, aggregation=aggregation)
        update_spec = dataclasses.replace(ref.LEARNER, loss=settings)
        all_rows, _ = ref.gradient(update_spec, batch)
        got, metrics = ref.gradient(update_spec, batch, included=np.array([1, 0, 0, 1], bool))
        assert ref.distance(got, all_rows) <= 2e-6
        value = ref.plain_loss(ref.place_params(), batch, settings, range(ref.ROWS))
        np.testing.assert_allclose(metrics["loss"], value, rtol=1e-5)
        assert metrics["tokens"] == batch.response_lens[[0, 3]].sum()


def test_without_any_row_to_compute_the_gradient_is_0(mesh):
    got, metrics = ref.gradient(ref.LEARNER, ref.host_batch(), included=np.zeros(ref.ROWS, bool))
    assert not any(np.any(x) for x in jax.tree.leaves(got))
    assert metrics["loss"] == metrics["tokens"] == metrics["grad_norm"] == 0


@pytest.mark.parametrize("packing", PACKINGS)
def test_packed_rows_of_a_mixture_give_the_gradient_of_padded_rows(mesh, packing):
    """Without the balance loss; the load counts each token that is computed once for each layer."""
    batch = ref.on_mesh(ref.host_batch(shared=True))
    model = ref.MODEL.replace(num_experts=6, experts_per_token=2)
    params = random_params(model, 0.4)

    def gradient_by(packing: str, coef: float = 0.0):
        spec = dataclasses.replace(ref.LEARNER, model=model, packing=packing, balance_coef=coef)
        state = init_policy_state(spec, transformer.place_params(model, params))
        state, sums = update(spec, state, batch, ref.pack(batch, spec))
        return state.policy.opt_state, sums

    got, sums = gradient_by(packing)
    want, _ = gradient_by("rows")
    assert ref.distance(got, want) <= 5e-6
    tokens_LE = np.asarray(sums["expert_tokens"])
    assert tokens_LE.shape == (model.num_layers, 6)
    assert len(set(tokens_LE.sum(axis=1).tolist())) == 1
    lens = batch.prompt_lens + batch.response_lens
    rows = 2 * int(np.sum(lens))
    assert tokens_LE[0].sum() == rows if packing == "rows" else tokens_LE[0].sum() <= rows
    other, _ = gradient_by(packing, coef=0.5)
    assert ref.distance(other, want) > 1e-3

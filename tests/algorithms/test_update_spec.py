"""Settings of the update from the config, learning rates, AdamW."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import small_runs
from small_models import MODEL

from specrl_jax.algorithms.corrections import MASKS
from specrl_jax.algorithms.losses import LossConfig
from specrl_jax.algorithms.update_spec import make_optimizer, make_schedule, make_update_spec


def test_adamw_and_clipping_against_the_formulas(mesh):
    """Two steps of clip → AdamW (arXiv 1711.05101) in float64 NumPy."""
    settings = small_runs.small_config(
        {
            "updates.learning_rate": 0.1,
            "updates.lr_schedule": "linear",
            "updates.weight_decay": 0.05,
            "updates.beta1": 0.8,
            "updates.beta2": 0.95,
            "updates.epsilon": 1e-4,
            "updates.clip_norm": 0.5,
        }
    ).updates
    optimizer = make_optimizer(settings, make_schedule(settings, 4))
    rng = np.random.default_rng(0)
    p = rng.normal(size=5)
    m = v = np.zeros(5)
    params = jnp.asarray(p, jnp.float32)
    state = optimizer.init(params)
    for step in (1, 2):
        g = rng.normal(size=5)
        updates, state = optimizer.update(jnp.asarray(g, jnp.float32), state, params)
        params = optax.apply_updates(params, updates)
        g = g * min(1, 0.5 / np.linalg.norm(g))
        m, v = 0.8 * m + 0.2 * g, 0.95 * v + 0.05 * g**2
        adam = m / (1 - 0.8**step) / (np.sqrt(v / (1 - 0.95**step)) + 1e-4)
        p = p - 0.1 * (1 - (step - 1) / 4) * (adam + 0.05 * p)
        np.testing.assert_allclose(params, p, rtol=1e-5)


def test_no_clipping_where_the_norm_is_0():
    settings = small_runs.small_config({"updates.clip_norm": 0.0}).updates
    optimizer = make_optimizer(settings, optax.constant_schedule(1.0))
    grads, params = jnp.asarray([3e4, 4e4]), jnp.zeros(2)
    _, (_, adam) = optimizer.update(grads, optimizer.init(params), params)
    np.testing.assert_allclose(adam[0].mu, (1 - settings.beta1) * grads, rtol=1e-6)


@pytest.mark.parametrize(
    ("schedule", "ramp", "want"),
    [
        ("constant", 0, [1, 1, 1, 1, 1, 1]),
        ("linear", 0, [1, 5 / 6, 4 / 6, 3 / 6, 2 / 6, 1 / 6]),
        ("cosine", 0, [0.5 * (1 + np.cos(np.pi * n / 6)) for n in range(6)]),
        ("constant", 2, [0.5, 1, 1, 1, 1, 1]),
        ("constant", 1, [1, 1, 1, 1, 1, 1]),
        ("linear", 2, [0.5, 1, 1, 0.75, 0.5, 0.25]),
        ("cosine", 2, [0.5, 1, *(0.5 * (1 + np.cos(np.pi * n / 4)) for n in range(4))]),
        ("constant", 8, [n / 8 for n in range(1, 7)]),
    ],
)
def test_the_learning_rate_by_step(schedule, ramp, want):
    settings = small_runs.small_config(
        {"updates.lr_schedule": schedule, "updates.lr_warmup_steps": ramp}
    ).updates
    rate = make_schedule(settings, 6)
    got = [float(rate(step)) for step in range(6)]
    np.testing.assert_allclose(got, settings.learning_rate * np.asarray(want), rtol=1e-5, atol=1e-9)


def test_the_update_takes_its_fields_from_the_config():
    masks = {name: 0.125 * i for i, name in enumerate(MASKS, 1) if "high" not in name}
    masks |= {name: 1.0 + i for i, name in enumerate(MASKS, 1) if "high" in name}
    config = small_runs.small_config(
        {
            "algorithm.aggregation": "sequence", "algorithm.kl_coef": 0.25,
            "rollout.temperature": 0.7, "updates.old_logprobs": "recompute",
            "updates.token_budget": 20, "algorithm.entropy_coef": 0.125,
            "algorithm.importance_cap": 2.0,
        }
        | {f"algorithm.mask.{name}": bound for name, bound in masks.items()}
    )  # fmt: skip
    update_spec = make_update_spec(config, MODEL, optax.constant_schedule(1.0))
    want = {f.name: config.algorithm.get(f.name) for f in dataclasses.fields(LossConfig)}
    elsewhere = {"max_response_len": 6, "group_size": 8, "old_logprobs": "recompute", "terms": ()}
    got = dataclasses.asdict(update_spec.loss)
    assert dict(got.pop("masks")) == masks
    want.pop("masks")
    assert got == want | elsewhere
    assert (update_spec.loss.aggregation, update_spec.loss.kl_coef) == ("sequence", 0.25)
    assert (update_spec.temperature, update_spec.logits_chunk) == (0.7, config.updates.logits_chunk)
    assert update_spec.loss_count == 20
    assert update_spec.micro_batch_size == config.updates.micro_batch_size


@pytest.mark.parametrize(("vocab", "tensor"), [(MODEL.vocab_size + 1, 1), (3, 2)])
def test_a_head_drafts_no_more_tokens_than_there_are_and_equal_parts(make_mesh, vocab, tensor):
    config = small_runs.small_config({"rollout.head.vocab": vocab})
    rule = f"^rollout.head.vocab must be 0 or a multiple of mesh.tensor = {tensor}, at most "
    with jax.set_mesh(make_mesh(1, 1, tensor)), pytest.raises(ValueError, match=rule):
        make_update_spec(config, MODEL, optax.constant_schedule(1.0), has_draft_head=True)

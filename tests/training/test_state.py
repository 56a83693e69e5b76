"""State parts save and restore themselves, and are absent where they are off."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_runs import line_of, one_line, small_config

from specrl_jax.process.checkpoint import Checkpointer
from specrl_jax.training import build as building
from specrl_jax.training.build import build, init_state, resume
from specrl_jax.training.origin import RunOrigin
from specrl_jax.training.state import RunState

ALWAYS = {"stream", "store", "origin", "reused_noise", "collector"}
ADAPTIVE = {"rollout.adaptive": True}


def _states(changes: dict, algorithm: str = "grpo") -> tuple[RunState, RunState]:
    """Two states before the first step."""
    run, params = build(small_config({"rollout.adaptive": False} | changes, algorithm))
    return tuple(init_state(run, jax.tree.map(np.copy, params)) for _ in range(2))


@pytest.mark.parametrize(
    ("changes", "algorithm", "on"),
    [
        ({}, "grpo", set()),
        ({"algorithm.kl_coef": 0.1}, "grpo", {"reference"}),
        ({"rollout.run_ahead": True, "rollout.accept": "match"}, "grpo", set()),
        ({"rollout.partial": 2}, "grpo", set()),
        ({"rollout.staleness": 1}, "grpo", {"batches"}),
        ({"rollout.draft": "none"}, "dapo", set()),
        (ADAPTIVE | {"rollout.draft": "previous+tree"}, "grpo", {"speculation"}),
        (ADAPTIVE, "grpo", set()),  # steps have no drafts, so there is no width to choose
    ],
)
def test_a_part_that_is_off_is_absent_and_what_is_saved_can_be_restored(
    mesh, changes, algorithm, on
):
    state, other = _states(changes, algorithm)
    assert state.parts.keys() == ALWAYS | on
    assert state.arrays().keys() == {"train"} | ALWAYS | on
    own = {"step", "skipped_in_row", "tokens_generated", "seconds", "machine", "rates"}
    assert state.host().keys() == own | ALWAYS | on
    state.step = 7
    state.skipped_in_row = 1
    state.tokens_generated = 2**40 + 1
    state.seconds = 0.1 + 0.2
    state.rates = (0.2, 0.1)
    host = json.loads(json.dumps(state.host()))
    other.restore(host, state.arrays())
    assert other.step == 7
    assert other.skipped_in_row == 1
    assert (other.tokens_generated, other.seconds) == (2**40 + 1, 0.1 + 0.2)
    assert [*other.rates] == [0.2, 0.1]
    other.restore(
        {k: x for k, x in host.items() if k not in ("seconds", "tokens_generated", "rates")},
        state.arrays(),
    )  # of a checkpoint that has none of them
    assert (other.tokens_generated, other.seconds, other.rates) == (0, 0.0, None)
    other.restore(host, state.arrays())
    assert json.loads(json.dumps(other.host())) == host
    like, arrays = jax.tree.leaves(state.arrays()), jax.tree.leaves(other.arrays())
    assert [(x.shape, x.dtype) for x in like] == [(x.shape, x.dtype) for x in arrays]


def test_a_changed_model_is_refused_where_it_matters(mesh, tmp_path):
    """Its weights where the KL penalty's reference is read from them, its shape always."""
    run, params = build(small_config({"algorithm.kl_coef": 0.1}))
    without = dataclasses.replace(run, config=small_config())
    other = params | {"embed": params["embed"] * 2}
    theta = dataclasses.replace(run, model=run.model.replace(rope_theta=5.0))
    state = init_state(run, jax.tree.map(jnp.copy, params))
    with Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(0, state.arrays(), state.host())
        for step in (None, 0):  # of this run, and of another one
            resume(run, params, checkpoints, step)
            with pytest.raises(ValueError, match=r"^model.source must .* weights, which") as error:
                resume(run, other, checkpoints, step)
            one_line(error)
            with pytest.raises(ValueError, match=r"rope_theta was 10000.0, now 5.0; put its fil"):
                resume(theta, params, checkpoints, step)
        assert resume(without, other, checkpoints, 0).origin.weights == state.origin.weights


def test_changed_held_out_prompts_are_refused(mesh, tmp_path):
    """However they are batched; a run that evaluates none is not asked."""
    config = small_config({"evaluate.every": 1})
    run, params = build(config)
    ((prompts, real),) = run.held_out
    edited = dataclasses.replace(prompts, tokens=prompts.tokens[:, ::-1])
    parts = [(prompts.select(range(i, j)), j - i) for i, j in ((0, 4), (4, real))]
    state = init_state(run, jax.tree.map(jnp.copy, params))
    with Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(0, state.arrays(), state.host())
        for held_out in (parts, []):
            resume(dataclasses.replace(run, held_out=held_out), params, checkpoints)
        with pytest.raises(ValueError, match=r"^data must be as in the checkpoint: the held-out"):
            resume(dataclasses.replace(run, held_out=[(edited, real)]), params, checkpoints)


@pytest.mark.parametrize("moved", [False, True], ids=["same", "another"])
def test_on_another_machine_seconds_are_measured_again(mesh, tmp_path, monkeypatch, capsys, moved):
    """What drafts have brought stays."""
    run, params = build(small_config({"rollout.draft": "previous+tree"} | ADAPTIVE))
    state = init_state(run, jax.tree.map(jnp.copy, params))
    speculation = state.rollout.speculation
    speculation.seconds = {(32, 1): 0.5}
    speculation.observe([1, 2], width=2)
    with Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(0, state.arrays(), state.host())
        if moved:
            monkeypatch.setattr(building, "machine", lambda: {"device": "another"})
        resumed = resume(run, params, checkpoints, 0).rollout.speculation
    assert ("now on {'device': 'another'}" in capsys.readouterr().out) == moved
    assert resumed.reached == speculation.reached != []
    assert resumed.accepted == speculation.accepted
    assert resumed.seconds == (None if moved else {(32, 1): 0.5})


def test_a_resume_with_other_solutions_is_refused():
    origin = RunOrigin("", {}, 0, data={"solutions": "now"}, is_reference=False)
    host = {"shape": {}, "weights": 0, "data": {"solutions": "before"}}
    line = line_of(origin.restore, host, None)
    assert line.startswith("data must be as in the checkpoint: the solutions were before, are now;")
    assert origin.restore(host | {"data": {"solutions": "now"}}, None) == origin
    without = origin.restore(host | {"data": {"held-out prompts": "some"}}, None)
    assert without.data == {"solutions": "now", "held-out prompts": "some"}

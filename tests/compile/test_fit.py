"""Rows that fit a device: by hand, and against the compiler's report."""

import dataclasses

import jax
import pytest
import small_runs

from specrl_jax.abstract import device_bytes
from specrl_jax.compile import fit, memory, programs
from specrl_jax.compile.from_config import abstract_run
from specrl_jax.process import runtime
from specrl_jax.rollout.engine.shapes import RolloutShapes
from specrl_jax.standard_hooks import StandardHooks
from specrl_jax.train import train

# Shapes as of the tests in test_memory: 3 prompt and 6 response slots, 16 tokens, 4 heads.
KINDS = {
    "previous": {"rollout.response_len": 96},
    "tree": {"rollout.response_len": 96, "rollout.draft": "previous+tree", "rollout.max_width": 8},
    "head": {"rollout.response_len": 96, "rollout.draft": "head", "algorithm.kl_coef": 0.1},
    "adapters": {"rollout.response_len": 96, "lora.rank": 2},
}


def run_of(changes=None, **more):
    return abstract_run(small_runs.small_config(changes, **more))


def test_rows_of_a_made_up_memory():
    """A tenth is spared: of 10,000 bytes 9,000. A shard's rows are a multiple of 8, or few."""
    assert fit.Need(beside=1_000, row=100).rows(10_000) == 80
    assert fit.Need(beside=1_050, row=100).rows(10_000) == 72  # 79 would fit
    assert fit.Need(beside=8_250, row=100).rows(10_000) == 7
    assert fit.Need(beside=8_950, row=100).rows(10_000) == 0
    assert fit.Need(beside=20_000, row=100).rows(10_000) == 0


def test_a_row_by_hand(mesh):
    run = run_of()
    need = fit.estimate(run.kept, run.training)
    cache = 9 * 2 * 2 * 4 * 4  # slots, keys and values, heads, their size, bytes
    kept = 11 * 4 + 2 + 7 * (3 * 4 + 1)  # numbers, marks; four arrays of 6 tokens and a margin
    step = 2 * 4 * (16 + 4 * 9)  # logits and scores, twice
    texts = 4 * (4 * 18 + 9)  # a sequence of two rows, a slot for each token
    assert need.row == cache + kept + step + texts
    arrays = [run.kept, run.training.all_rows, run.training.drafts]
    copied = device_bytes(run.weights) - device_bytes(run.weights["stacked"])
    slot = 2 * 2 * 4 * 4
    chunk = 14 * 18  # a chunk of 256 tokens holds so many sequences
    hidden = 4 * chunk * (16 + 3 * 32)
    scores = 4 * chunk * 18 * 4
    block = 32 * max(4 * 6 * 16, 9 * slot)  # rows, each with logits of 6 columns, or its cache
    prefill = 2 * (chunk * slot + hidden + scores + block)
    assert need.beside == device_bytes(arrays) + copied + prefill


@pytest.mark.parametrize("shape", [(1, 1, 1), (2, 2, 2)], ids=["one device", "eight"])
def test_the_rows_that_fit_are_in_the_spec(make_mesh, shape):
    with jax.set_mesh(make_mesh(*shape)):
        run = run_of({"evaluate.every": 1})
        pieces = shape[0] * shape[1]
        need = fit.estimate(run.kept, run.training)
        fitted = fit.fit_rows(run, (need.beside + 4.5 * need.row) / 0.9)
        assert fitted.spec.max_rows == 4 * pieces
        assert fitted.training.buckets.sizes[0] == 4 * pieces
        assert fitted.eval_spec.max_rows >= fitted.spec.max_rows  # it has no drafts
        assert fit.fit_rows(run, 2.0**40).training.buckets.sizes[0] == run.rows
        given = run_of({"rollout.max_rows": 8})
        assert fit.fit_rows(given, 1.0) is given
        line = small_runs.line_of(fit.fit_rows, run, need.beside / 0.9)
    assert line.startswith("rollout.response_len must be smaller: a row of 9 slots takes ")
    assert line.endswith(", got 6")


def test_an_evaluation_takes_the_rows_that_fit_beside_the_policy(mesh, monkeypatch):
    run = run_of({"evaluate.every": 1})
    params = run.state.policy.params
    monkeypatch.setattr(memory, "device_memory", lambda: (2.0**40, "this machine"))
    spec = fit.fit_evaluation(run.eval_spec, run.weights, params, rows=64)
    assert spec.buckets(64).sizes[0] == 64
    shapes = RolloutShapes(run.eval_spec, run.weights, 64, 64, None)
    row = fit.estimate((), shapes).row
    beside = fit.estimate((), shapes).beside + device_bytes(params)
    monkeypatch.setattr(memory, "device_memory", lambda: ((beside + 8.5 * row) / 0.9, ""))
    assert fit.fit_evaluation(run.eval_spec, run.weights, params, rows=64).max_rows == 8
    given = dataclasses.replace(run.eval_spec, max_rows=4)
    assert fit.fit_evaluation(given, run.weights, params, rows=64) is given


# Of each kind one is enough for the check: shards differ in their number alone.
ON_TWO = ("head", "adapters")


@pytest.mark.parametrize(
    ("kind", "shape"),
    [
        pytest.param(
            kind, (1, devices, 1), marks=[pytest.mark.slow] * ((kind in ON_TWO) != (devices == 2))
        )
        for kind in KINDS
        for devices in (1, 2)
    ],
)
def test_the_compiler_needs_no_more_than_was_estimated(make_mesh, kind, shape):
    with jax.set_mesh(make_mesh(*shape)):
        run = run_of(KINDS[kind], **{"rollout.prompts_per_step": 16, "data.prompts": 16})
        need = fit.estimate(run.kept, run.training)
        kept = device_bytes(run.kept)
        rows = run.training.buckets.sizes[0] // run.training.buckets.shards
        listed = list(programs.rollout_programs(run.training))
        compiled = programs.compile_all(listed)
        most = max(programs.needed_bytes(x, compiled[x.name], kept) for x in listed)
    assert 0.3 < most / (need.beside + rows * need.row) < 1


def test_a_run_computes_the_rows_that_fit(mesh, tmp_path, monkeypatch, capsys):
    config = small_runs.small_config(**{"train.steps": 1, "sft.steps": 0})
    run = abstract_run(config)
    need = fit.estimate(run.kept, run.training)
    # The store of a run has its own prompts, so less beside.
    there = (need.beside + 8.5 * need.row) / 0.9
    monkeypatch.setattr(memory, "device_memory", lambda: (there, "this machine"))
    runtime.compile_metrics()
    monkeypatch.setattr(
        programs, "compile_run", lambda *args: None
    )  # which needs more, and says it
    train(config, tmp_path, hooks=StandardHooks())
    lines = capsys.readouterr().out.splitlines()
    (line,) = [line for line in lines if line.startswith("rollout: ")]
    assert line.startswith("rollout: 8 of 32 rows at a time, 8 on each shard; their cache takes ")

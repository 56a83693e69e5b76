"""The estimate of a run's largest arrays, and what is said where memory cannot be had."""

import re

import jax.numpy as jnp
import numpy as np
import pytest
from small_runs import line_of, small_config

from specrl_jax import sharding
from specrl_jax.command_line import cli
from specrl_jax.compile import memory
from specrl_jax.inputs import OutOfMemoryError
from specrl_jax.models.load import load_shape

# 3 prompt and 6 response slots, 16 tokens, one layer: 16 wide, 2 key/value heads of 4, MLP of 32.
EVERYTHING = {"sft.steps": 1, "evaluate.every": 1}


def _sizes(changes: dict) -> dict[tuple[str, str], float]:
    config = small_config(EVERYTHING | changes)
    stages = memory.stages(config, load_shape(config, 16), prompts=8)
    return {(stage, part.what): part.bytes for stage, parts in stages for part in parts}


def test_sizes_are_those_of_the_arrays(mesh):
    sizes = _sizes({})
    # A row, as many as fit.
    assert sizes["a rollout", "KV cache"] == 9 * (2 * 2 * 4) * 4
    assert sizes["a rollout", "logits of a decode step"] == 16 * 4
    assert sizes["a rollout", "stored drafts"] == 8 * 8 * 6 * 4 * 4
    assert sizes["an update", "activations"] == 8 * 18 * (2 * 16 + 3 * 32) * 4
    assert sizes["the warm-up", "logits"] == 8 * 9 * 16 * 4
    assert sizes["an evaluation", "KV cache"] == 9 * (2 * 2 * 4) * 4
    drafted = _sizes({"rollout.draft": "previous+tree", "rollout.tree.history": 3})
    assert drafted["a rollout", "stored drafts"] == 8 * 8 * 6 * (3 * 4 + 3 * 4)
    # 32 rows lie in 16 sequences of 18 slots, of which a CPU computes 14 at once.
    chunk = _sizes({"updates.mini_batch_size": 32})
    assert chunk["an update", "activations"] == 14 * 18 * (2 * 16 + 3 * 32) * 4
    assert chunk["an update", "logits"] == 14 * 18 * 16 * 4
    bounded = _sizes({"rollout.max_rows": 16})
    assert bounded["a rollout", "KV cache"] == 16 * 9 * (2 * 2 * 4) * 4
    assert bounded["an evaluation", "KV cache"] == 8 * 9 * (2 * 2 * 4) * 4


@pytest.mark.parametrize(
    ("field", "value", "more", "stage", "part"),
    [
        ("sft.batch_size", 10**6, {}, "the warm-up", "activations"),
        ("rollout.response_len", 10**6, {}, "a rollout", "stored drafts"),
        ("evaluate.samples", 10**7, {"rollout.max_rows": 10**8}, "an evaluation", "KV cache"),
        ("rollout.tree.history", 10**9, {"rollout.draft": "tree"}, "a rollout", "stored drafts"),
        ("model.embed_dim", 10**6, {}, "a rollout", "weights and optimizer"),
    ],
)
def test_what_cannot_fit_is_refused_with_the_field_that_sets_it(
    mesh, monkeypatch, field, value, more, stage, part
):
    monkeypatch.setattr(memory, "device_memory", lambda: (2.0**30, "this machine"))
    config = small_config(EVERYTHING | more | {field: value})
    line = line_of(memory.check, config, load_shape(config, 16), prompts=8)
    rule = f"{field} must be smaller: {stage} needs about [^ ]* GiB, more than the 1 GiB of this "
    assert re.match(f"{rule}machine, most of it for {part}[^\n]*, got {value}$", line)
    monkeypatch.undo()
    small = small_config(EVERYTHING)
    memory.check(small, load_shape(small, 16), prompts=8)


@pytest.mark.parametrize(("bound", "rule"), [(0, "> 0"), (2_000_000, "smaller")])
def test_activations_of_many_rows_want_a_bound(mesh, monkeypatch, bound, rule):
    monkeypatch.setattr(memory, "device_memory", lambda: (2.0**30, "this machine"))
    monkeypatch.setitem(sharding.CHUNK_TOKENS, "cpu", 10**8)
    config = small_config({
        "updates.mini_batch_size": 4_000_000, "updates.micro_batch_size": bound,
        "rollout.max_rows": 16,
    })  # fmt: skip
    line = line_of(memory.check, config, load_shape(config, 16), prompts=8)
    assert line.startswith(f"updates.micro_batch_size must be {rule}: an update needs about ")
    assert line.endswith(f", got {bound}")


def test_a_containers_limit_counts(mesh, monkeypatch, tmp_path):
    limits = [tmp_path / "none", tmp_path / "max", tmp_path / "bytes"]
    limits[1].write_text("max\n")
    limits[2].write_text("123456\n")
    monkeypatch.setattr(memory, "_CGROUP_LIMITS", limits[:2])
    assert memory.device_memory()[0] > 2**30
    monkeypatch.setattr(memory, "_CGROUP_LIMITS", limits)
    assert memory.device_memory() == (123456, "this machine")


@pytest.mark.parametrize(
    "allocate",
    [lambda: np.zeros(10**15), lambda: jnp.zeros(10**15).block_until_ready()],
    ids=["host", "device"],
)
def test_a_failed_allocation_is_one_line(mesh, capsys, allocate):
    config = small_config(EVERYTHING)
    with (
        pytest.raises(OutOfMemoryError) as error,
        memory.explain_shortage(config, load_shape(config, 16), prompts=8),
    ):
        allocate()
    named = r"; the largest arrays take at least activations, .* \(.* x rollout.response_len\); "
    assert re.search(rf"^out of memory: [^\n]*{named}[^\n]*; lower one of these", str(error.value))
    with pytest.raises(SystemExit), cli.user_errors():
        allocate()
    assert re.fullmatch(
        r"error: out of memory: [^\n]*#memory lists [^\n]*\n", capsys.readouterr().err
    )


def test_other_errors_pass(mesh):
    config = small_config()
    for error in (KeyError("x"), ValueError("RESOURCE_EXHAUSTED: the disk")):
        with (
            pytest.raises(type(error)),
            memory.explain_shortage(config, load_shape(config, 16), prompts=8),
        ):
            raise error

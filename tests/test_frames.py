"""The way from `train.step` to the jitted programs of a rollout is short enough to be read."""

import pathlib
import sys

import pytest
from ml_collections import ConfigDict
from small_runs import small_config

import specrl_jax
from specrl_jax import train as loop
from specrl_jax.rollout.engine import decode

PACKAGE = str(pathlib.Path(specrl_jax.__file__).parent)
PROGRAMS = ("decode_steps", "prefill", "verify_trie", "re_prefill")
MOST = 8  # frames, `train.step` included
DAPO = {"reward.name": "small_runs:score_first_letter", "reward.extract": "", "data.prompts": 48}


def frames_of_the_package(frame) -> list[str]:
    """Names of the package's functions from `train.step` to this frame."""
    names = []
    while frame is not None:
        if frame.f_code.co_filename.startswith(PACKAGE):
            names.append(frame.f_code.co_name)
            if frame.f_code is loop.step.__code__:
                return names[::-1]
        frame = frame.f_back
    return []  # called by something else, such as an evaluation


# Rows are prefilled again with their tokens once the environment has answered.
GUESS = {
    "environment.name": "guess", "environment.max_turns": 2, "reward.extract": "",
    "data.source": "guess", "data.name": "guess", "data.prompt_len": 4,
    "tokenizer.alphabet": "0123456789-?<>", "rollout.response_len": 10,
}  # fmt: skip
# Verified from packed tries where prompt slots are many: a prefill would compute them all.
GRPO = {"data.prompt_len": 24}
CASES = {
    "grpo": ("grpo", GRPO, {"decode_steps", "prefill", "verify_trie"}),
    "environment": ("grpo", GUESS, {"decode_steps", "prefill", "re_prefill"}),
    "dapo": ("dapo", DAPO, {"decode_steps", "prefill"}),
}


@pytest.mark.parametrize(
    "case", ["grpo", *(pytest.param(x, marks=pytest.mark.slow) for x in ("environment", "dapo"))]
)
def test_few_frames_lie_between_a_step_and_the_programs_of_a_rollout(
    mesh, tmp_path, monkeypatch, case
):
    stacks = set()

    def watched(name, program):
        def call(*args, **kwargs):
            if frames := frames_of_the_package(sys._getframe(1)):
                stacks.add((name, *frames))
            return program(*args, **kwargs)

        return call

    for name in PROGRAMS:
        monkeypatch.setattr(decode, name, watched(name, getattr(decode, name)))
    algorithm, changes, used = CASES[case]
    changes = {
        "rollout.draft": "previous", "rollout.accept": "ratio", "rollout.adaptive": False,
        "train.steps": 4,
    } | changes  # fmt: skip
    config = small_config(algorithm=algorithm)
    if "data.source" in changes:
        config.data.options = ConfigDict()  # of that source
    config.update_from_flattened_dict(changes)
    loop.train(config, tmp_path / "run")
    assert {name for name, *_ in stacks} >= used
    for name, *frames in stacks:
        assert len(frames) <= MOST, (name, frames)

"""The way from `train.step` to the jitted decode loop is short enough to be read."""

import pathlib
import sys

import pytest
from small_runs import small_config

import specrl_jax
from specrl_jax import train as loop
from specrl_jax.rollout.engine import decode

PACKAGE = str(pathlib.Path(specrl_jax.__file__).parent)
MOST = 8
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


@pytest.mark.parametrize(
    ("algorithm", "changes"),
    [("grpo", {}), pytest.param("dapo", DAPO, marks=pytest.mark.slow)],
    ids=["grpo", "dapo"],
)
def test_few_frames_lie_between_a_step_and_the_decode_loop(
    mesh, tmp_path, monkeypatch, algorithm, changes
):
    stacks, decode_steps = {}, decode.decode_steps

    def seen(*args, **kwargs):
        frames = frames_of_the_package(sys._getframe(1))
        if frames:
            stacks[tuple(frames)] = kwargs["width"]
        return decode_steps(*args, **kwargs)

    monkeypatch.setattr(decode, "decode_steps", seen)
    changes = {
        "rollout.draft": "previous", "rollout.accept": "ratio", "rollout.adaptive": False,
        "train.steps": 4,
    } | changes  # fmt: skip
    loop.train(small_config(changes, algorithm=algorithm), tmp_path / "run")
    assert max(stacks.values()) > 1  # a verification, beside decoding
    assert min(stacks.values()) == 1
    for frames in stacks:
        assert len(frames) <= MOST, frames

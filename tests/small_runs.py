"""Whole runs in seconds: the preset micro, shrunk until a step costs milliseconds.

Also a configuration file for launch/train.py (`--config=tests/small_runs.py`). The task is to name
the one digit of the prompt; the last digit of a response counts, so that even a random policy is
right one time in ten and has advantages to learn from.
"""

import functools
import multiprocessing
import os
import pathlib
import runpy
import signal
import subprocess
import sys

import jax
import numpy as np

ROOT = pathlib.Path(__file__).resolve().parent.parent


def never(response: str, answer: str, task: str, metadata: dict) -> float:
    """A scorer that always fails."""
    raise KeyError("column")


def preset(name: str, algorithm: str = "grpo"):
    """A preset of configs/ALGORITHM.py."""
    return runpy.run_path(str(ROOT / "configs" / f"{algorithm}.py"))["get_config"](name)


def get_config():
    """8 prompts x 4 responses of 6 tokens, 2 steps an epoch; no warm-up, no evaluation."""
    return small_config()


def small_config(changes=None, algorithm: str = "grpo", **more):
    """The small run with these fields changed, e.g. {"rollout.draft": "none"}."""
    config = preset("micro", algorithm)
    values = {
        "model.embed_dim": 16,
        "model.mlp_dim": 32,
        "model.head_dim": 4,
        "model.num_layers": 1,
        "data.options.min_numbers": 1,
        "data.options.max_numbers": 1,
        "data.prompts": 8,
        "data.eval_prompts": 6,
        "data.prompt_len": 3,
        "reward.extract": r"(\d)",
        "reward.workers": 1,
        "reward.timeout": 60.0,  # no answer takes long; a busy machine may
        "rollout.prompts_per_step": 4,
        "rollout.group_size": 8,
        "rollout.response_len": 6,
        "rollout.row_buckets": 2,
        "rollout.max_rows": 0,
        "rollout.accept": "ratio",
        "rollout.lenience": 1.0,
        "rollout.noise_epochs": 1,
        "updates.mini_batch_size": 16,
        "updates.learning_rate": 0.02,
        "updates.lr_schedule": "constant",
        "updates.lr_warmup_steps": 0,
        "sft.steps": 0,
        "sft.batch_size": 8,
        "sft.examples": 16,
        "evaluate.every": 0,
        "evaluate.batch_size": 8,
        "checkpoint.every": 100,
        "train.epochs": 2,
        "log.tracker": "none",
        "log.report": False,
    }
    config.update_from_flattened_dict(values | (changes or {}) | more)
    return config


def set_field(config, field: str, value) -> None:
    """Sets what a config file might, of any type."""
    *sections, name = field.split(".")
    section = functools.reduce(lambda node, part: node[part], sections, config)
    del section[name]  # with the type of its value
    section[name] = value


def score_first_letter(response: str, answer: str, task: str, metadata: dict) -> float:
    """Right where the response starts with 0 or 1."""
    return float(response[:1] in ("0", "1"))


def score_some(response: str, answer: str, task: str, metadata: dict) -> float:
    """The same for every response, none is right."""
    return 0.25


class Sums:
    """Answers every response with a digit, the sum of all digits said so far modulo 8, until that
    is the problem's answer; "9" in a response breaks it, "8" takes it for ever."""

    def reset(self, answer: str, task: str, metadata: dict) -> None:
        self._target, self._sum = int(answer.split()[0]), 0

    def step(self, response: str):
        if "9" in response:
            raise RuntimeError("nine")
        while "8" in response:
            pass
        self._sum += sum(int(c) for c in response if c.isdecimal())
        done = self._sum % 8 == self._target
        return str(self._sum % 8), float(done), done


def play(make, responses, answer: str, task: str = "", metadata: dict | None = None):
    """Returns the last answer of an environment, (observation, reward of all turns, done)."""
    environment = make()
    environment.reset(answer=answer, task=task, metadata=metadata or {})
    steps = [environment.step(response) for response in responses]
    return steps[-1][0], sum(step[1] for step in steps), steps[-1][2]


class QuickSums(Sums):
    """`Sums` that "8" breaks too."""

    def step(self, response: str):
        return super().step(response.replace("8", "9"))


def records(workdir, times: bool = False) -> list[dict]:
    """The run's metrics by step, without those of the clock and the compiler unless requested."""
    from specrl_jax.telemetry.metrics import read_metrics

    left_out = () if times else ("time/", "compile/", "speed/", "memory/")
    lines = read_metrics(workdir)
    return [{k: v for k, v in r.items() if not k.startswith(left_out)} for r in lines]


def saved(workdir, step: int) -> dict[str, np.ndarray]:
    """All arrays of a checkpoint, by name, read without the package's own code."""
    import orbax.checkpoint as ocp

    path = pathlib.Path(workdir).resolve() / "checkpoints" / str(step) / "arrays"
    reader = ocp.PyTreeCheckpointHandler()
    as_numpy = lambda _: ocp.RestoreArgs(restore_type=np.ndarray)  # noqa: E731
    args = jax.tree.map(as_numpy, dict(reader.metadata(path).tree))
    tree = reader.restore(path, args=ocp.args.PyTreeRestore(restore_args=args))
    return {name: np.asarray(x) for name, x in tree.items()}


def files(workdir) -> dict[str, bytes]:
    """Every file of a work directory with its content."""
    root = pathlib.Path(workdir)
    return {
        str(path.relative_to(root)): path.read_bytes()
        for path in sorted(root.rglob("*"))
        if path.is_file()
    }


def interrupt(owner: type, method: str, step: int, number: int = signal.SIGKILL):
    """From now on this process gets a signal as soon as owner.method(step, ...) has returned."""
    original = getattr(owner, method)

    def call(self, at, *args, **kwargs):
        result = original(self, at, *args, **kwargs)
        if at == step:
            os.kill(os.getpid(), number)
        return result

    setattr(owner, method, call)


# A small run spends nine tenths of its seconds on compiling, and more than half of these in the
# compiler of fusions. The tests go without it and without LLVM's optimizer; the same flags with
# =3 and =true in XLA_FLAGS bring both back.
FAST_COMPILATION = "--xla_backend_optimization_level=0 --xla_cpu_use_fusion_emitters=false"

# For a process that the tests start: one device, and programs compiled as theirs are.
ONE_DEVICE = {"XLA_FLAGS": FAST_COMPILATION}


def launch(program: str, *arguments: str, **environment: str) -> subprocess.CompletedProcess:
    """Runs `python PROGRAM ARGUMENTS` in the repository; `environment` is added to this one."""
    folders = [str(ROOT), str(ROOT / "tests"), os.environ.get("PYTHONPATH", "")]
    path = os.pathsep.join(filter(None, folders))
    return subprocess.run(
        [sys.executable, program, *arguments],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": path} | environment,
        capture_output=True,
        text=True,
        timeout=3600,
        check=False,
    )


def run_until_killed(target, *inputs) -> None:
    """target(*inputs) on one device, in a separate process that must die of SIGKILL."""
    spawn = multiprocessing.get_context("spawn")
    child = spawn.Process(target=on_one_device, args=(target, inputs))
    child.start()
    child.join()
    assert child.exitcode == -signal.SIGKILL


def on_one_device(target, inputs) -> None:
    """target(*inputs), for a separate process."""
    from specrl_jax.sharding import make_mesh

    os.environ["XLA_FLAGS"] += " " + ONE_DEVICE["XLA_FLAGS"]
    with jax.set_mesh(make_mesh(1, 1, 1, jax.devices()[:1])):
        target(*inputs)


def assert_same_run(workdir, other, step: int) -> None:
    """Metrics except wall-clock times, and everything in a checkpoint, bit for bit."""
    assert records(workdir) == records(other)
    arrays, expected = saved(workdir, step), saved(other, step)
    assert arrays.keys() == expected.keys()
    for name, array in arrays.items():
        assert array.tobytes() == expected[name].tobytes(), name


def one_line(error) -> str:
    """The text of an error that pytest has caught, which must be one line."""
    text = str(error.value)
    assert "\n" not in text
    return text


def line_of(call, *args, **kwargs) -> str:
    """The one line with which a call is refused."""
    import pytest

    with pytest.raises(ValueError) as error:  # noqa: PT011 - callers compare the text
        call(*args, **kwargs)
    assert type(error.value) is ValueError
    return one_line(error)


def assert_same_bits(tree, other) -> None:
    """Compare two trees of arrays, which may contain PRNG keys."""

    def bits(x) -> bytes:
        is_key = jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key)
        return np.asarray(jax.random.key_data(x) if is_key else x).tobytes()

    assert jax.tree.map(bits, tree) == jax.tree.map(bits, other)


def folders(path: pathlib.Path) -> list[str]:
    """Names of the folders in another one."""
    return sorted(p.name for p in path.iterdir() if p.is_dir())

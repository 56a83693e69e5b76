"""Benchmark `selection`: how much more likely training makes what it was trained on.

An acceptance rule is exact only for drafts that do not depend on the current weights, and the last
epoch's drafts were trained on. So responses of one policy π_old are compared: to held-out prompts,
of an evaluation, and to training prompts, of the step after it. The figure is the mean of
log π / π_old a token, under a later policy π. Its gap is 0 for drafts that do not depend on π.
"""

from pathlib import Path

import jax
import numpy as np

from specrl_jax.algorithms.scoring import logprobs, pack_rows
from specrl_jax.benchmarks.recorded import Recorded
from specrl_jax.benchmarks.reports import Report
from specrl_jax.checkpoint import Checkpointer
from specrl_jax.models.transformer import Params
from specrl_jax.state import resume
from specrl_jax.telemetry.records import read_rollouts, recorded_steps


def measure_selection(workdir: Path, step: int | None) -> Report:
    """Figures of a run that recorded rollouts; step: of the checkpoint, None for the latest."""
    run, rows = Recorded.of(workdir), []
    config = run.trainer.config
    with Checkpointer(workdir / "checkpoints", read_only=True) as checkpoints:
        step = checkpoints.latest_step() if step is None else step
        params = resume(run.trainer, run.params, checkpoints, step).train.params
    trained_on = recorded_steps(workdir)
    old = [n for n in recorded_steps(workdir, "eval") if n < step and n + 1 in trained_on]
    sampling = config.rollout.top_k, config.rollout.top_p, config.rollout.temperature
    if not old or sampling != (0, 1, config.evaluate.temperature):
        needs = "log.rollouts, evaluate.every, evaluate.temperature = rollout.temperature, no top_k"
        raise ValueError(f"{workdir}: nothing to compare at step {step}; a run needs {needs}")
    for name, which in {"trained on": (old[-1] + 1, "step"), "held out": (old[-1], "eval")}.items():
        records = read_rollouts(workdir, *which)
        ratios = _log_ratios(run, params, records)
        rows.append({"responses": name, "count": len(records), "tokens": len(ratios)})
        rows[-1]["nats_a_token"] = float(ratios.mean())
    gap = rows[0]["nats_a_token"] - rows[1]["nats_a_token"]
    title = f"selection {workdir}: log π / π_old; π of step {step}, π_old of step {old[-1]}"
    return Report(title, [*rows, {"responses": "gap", "nats_a_token": gap}])


def _log_ratios(run: Recorded, params: Params, records: list[dict]) -> np.ndarray:
    """log π / π_old [tokens] of the tokens that the policy of the recorded step drew itself."""
    batch, drawn = run.batch(records)
    learner = run.trainer.learner
    packed = pack_rows(learner, batch, np.arange(len(drawn)))
    new, old = jax.device_get((logprobs(learner, params, packed), batch.old_logprobs))
    return (new - old)[drawn]

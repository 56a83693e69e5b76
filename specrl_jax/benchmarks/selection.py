"""Benchmark `selection`: how much more likely training makes what it was trained on.

An acceptance rule is exact only for drafts that do not depend on the current weights, and the last
epoch's drafts were trained on. So responses of one policy π_old are compared: to held-out prompts,
of an evaluation, and to training prompts, of the step after it. The figure is the mean of
log π / π_old a token, under a later policy π. Its gap is 0 for drafts that do not depend on π.
"""

from pathlib import Path

import jax
import numpy as np

from specrl_jax import runtime
from specrl_jax.algorithms.learner import Learner
from specrl_jax.algorithms.scoring import logprobs, pack_rows
from specrl_jax.benchmarks.reports import Report
from specrl_jax.build import Trainer, build
from specrl_jax.checkpoint import Checkpointer
from specrl_jax.evaluation.saved_policy import run_config
from specrl_jax.models.transformer import Params
from specrl_jax.sharding import put, shards
from specrl_jax.state import resume
from specrl_jax.telemetry.records import read_rollouts, recorded_steps
from specrl_jax.types import Batch


def measure_selection(workdir: Path, step: int | None) -> Report:
    """Figures of a run that recorded rollouts; step: of the checkpoint, None for the latest."""
    config = run_config(workdir)
    runtime.start(config)
    trainer, params = build(config)
    with Checkpointer(workdir / "checkpoints", read_only=True) as checkpoints:
        step = checkpoints.latest_step() if step is None else step
        params = resume(trainer, params, checkpoints, step).train.params
    trained_on = recorded_steps(workdir)
    old = [n for n in recorded_steps(workdir, "eval") if n < step and n + 1 in trained_on]
    sampling = config.rollout.top_k, config.rollout.top_p, config.rollout.temperature
    if not old or sampling != (0, 1, config.evaluate.temperature):
        needs = "log.rollouts, evaluate.every, evaluate.temperature = rollout.temperature, no top_k"
        raise ValueError(f"{workdir}: nothing to compare at step {step}; a run needs {needs}")
    prompts, rows = encoded_prompts(trainer), []
    for name, which in {"trained on": (old[-1] + 1, "step"), "held out": (old[-1], "eval")}.items():
        records = read_rollouts(workdir, *which)
        ratios = log_ratios(trainer.learner, params, records, prompts)
        rows.append({"responses": name, "count": len(records), "tokens": len(ratios)})
        rows[-1]["nats_a_token"] = float(ratios.mean())
    gap = rows[0]["nats_a_token"] - rows[1]["nats_a_token"]
    title = f"selection {workdir}: log π / π_old; π of step {step}, π_old of step {old[-1]}"
    return Report(title, [*rows, {"responses": "gap", "nats_a_token": gap}])


def encoded_prompts(trainer: Trainer) -> dict[str, list[int]]:
    """Tokens of a run's prompts, held-out ones too, by prompt_id."""
    prompts = {}
    for batch in (trainer.prompts, *(batch for batch, _ in trainer.held_out)):
        for example, tokens, length in zip(batch.examples, batch.tokens, batch.lens):
            prompts[example.prompt_id] = tokens[:length].tolist()
    return prompts


def recorded_rows(
    records: list[dict], prompts: dict[str, list[int]]
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """tokens [B, T] of prompts and responses, both lengths [B], and policy_logprobs [B, R].

    nan: tokens that the recorded step's policy did not draw itself.
    """
    size = shards("batch")
    slots = max(len(record["token_ids"]) for record in records)
    shape = -(-len(records) // size) * size, max(map(len, prompts.values())) + slots
    tokens, old = np.zeros(shape, np.int32), np.full((shape[0], slots), np.nan, np.float32)
    prompt_lens, lens = np.ones(shape[0], np.int32), np.zeros(shape[0], np.int32)
    for row, record in enumerate(records):
        prompt, response = prompts[record["prompt_id"]], record["token_ids"]
        prompt_lens[row], lens[row] = len(prompt), len(response)
        tokens[row, : len(prompt) + len(response)] = prompt + response
        drawn = np.array(record["origin_steps"]) == record["step"]
        drawn &= np.array(list(record["sources"])) != "f"
        old_logprobs = np.array(record["policy_logprobs"], np.float32)
        old[row, : len(response)] = np.where(drawn, old_logprobs, np.nan)
    return tokens, prompt_lens, lens, old


def place_batch(
    tokens: np.ndarray, prompt_lens: np.ndarray, lens: np.ndarray, old_logprobs: np.ndarray,
    advantages: np.ndarray,
) -> Batch:  # fmt: skip
    """Rows on the device; advantages [B] are those of whole responses, a nan log-prob becomes 0."""

    def place(x: np.ndarray, dtype: type) -> jax.Array:
        return put(x.astype(dtype), "batch", *(None,) * (x.ndim - 1))

    of_rows = (place(x, np.int32) for x in (tokens, prompt_lens, lens))
    of_tokens = (
        np.nan_to_num(old_logprobs),
        np.broadcast_to(advantages[:, None], old_logprobs.shape),
    )
    return Batch(*of_rows, *(place(x, np.float32) for x in of_tokens))


def log_ratios(
    learner: Learner, params: Params, records: list[dict], prompts: dict[str, list[int]]
) -> np.ndarray:
    """log π / π_old [tokens] of the tokens that the policy of the recorded step drew itself."""
    *rows, old = recorded_rows(records, prompts)
    batch = place_batch(*rows, old, np.zeros(len(old)))
    packed = pack_rows(learner, batch, np.arange(len(old)))
    new = logprobs(learner, params, packed)
    ratios = jax.device_get(new) - old
    return ratios[np.isfinite(ratios)]

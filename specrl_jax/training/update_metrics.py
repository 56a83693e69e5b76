"""Metrics of a step's updates, and those that were skipped."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from specrl_jax import hosts
from specrl_jax.algorithms.losses import policy_metrics
from specrl_jax.algorithms.scoring import PackedRows, held_slots
from specrl_jax.config import flatten
from specrl_jax.training.run import Run
from specrl_jax.training.state import RunState
from specrl_jax.types import Batch


def drop_skipped_updates(
    run: Run, state: RunState, history: list[dict[str, np.ndarray]]
) -> list[dict[str, np.ndarray]]:
    """Return the scalars of the updates that were not skipped; count skips in a row in `state`.

    Raises a one-line FloatingPointError if weights, moments, loss or gradients are not finite, or
    `updates.skip_nonfinite` updates in a row were skipped.
    """
    fields = dict(flatten(run.config))
    made = []
    for scalars in history:
        module, name = _first_nonfinite(run, scalars)
        if not name:
            made.append(scalars)
            state.skipped_in_row = 0
            continue
        training = run.update_spec.trained[module]
        value = scalars[training.prefix + name]
        state.skipped_in_row += 1
        skippable = name in ("loss", "grad_norm")
        if not skippable or state.skipped_in_row >= fields["updates.skip_nonfinite"]:
            row = f", {state.skipped_in_row} updates in a row" if state.skipped_in_row > 1 else ""
            raise FloatingPointError(
                f"step {state.step}: {module.replace('_', ' ')}: {name} is {value}{row}; "
                f"lower {training.rate}, now {fields[training.rate]}"
            )
    return made


def _first_nonfinite(run: Run, scalars: dict[str, np.ndarray]) -> tuple[str, str]:
    """Return (module, name) of the first scalar that is not finite, or empty."""
    for name in ("loss", "grad_norm", "weight_norm", "moments"):
        for module, training in run.update_spec.trained.items():
            if not np.isfinite(scalars.get(training.prefix + name, 0.0)):
                return module, name
    return "", ""


@jax.jit
def count_packed(packed: PackedRows) -> tuple[Array, Array]:
    """Count the rows with a token, and the slots with one."""
    return jnp.sum(packed.nodes[:, 0] >= 0), jnp.sum(held_slots(packed.sequences))


def packing_metrics(mini_batches: list[PackedRows], batch: Batch, passes: int) -> dict[str, float]:
    """Return the share of a batch that its mini-batches compute, and the number of tokens."""
    num_rows, tokens = zip(*hosts.fetch([count_packed(x) for x in mini_batches]), strict=True)
    slots = sum(hosts.fetch(x.count) * x.sequences.tokens[0].size for x in mini_batches)
    return {
        "update/signal_fraction": sum(num_rows) / len(batch.tokens),
        "update/computed_fraction": slots / batch.tokens.size,
        "update/tokens": passes * sum(tokens),
    }


def update_metrics(
    run: Run, history: list[dict[str, np.ndarray]], *, stale: bool
) -> dict[str, float]:
    """Return metrics of the step's updates from their scalars; {} if there were none.

    stale: earlier weights sampled some of the tokens.
    """

    def mean(name: str) -> float:
        return np.mean([scalars[name] for scalars in history])

    def total(name: str) -> np.ndarray:
        return sum(scalars.get(name, 0) for scalars in history)

    if not history:
        return {}
    metrics = {"policy/loss": mean("loss"), "update/grad_norm": mean("grad_norm")}
    # Means over the computed tokens, if there are any.
    if total("tokens"):
        metrics |= policy_metrics(jax.tree.map(lambda *x: np.sum(x, axis=0), *history))
    for name in history[0]:
        if "/" in name and total(name)[1]:
            metrics[name] = np.divide(*total(name))
    if not run.update_spec.model.dense:
        tokens_LE = total("expert_tokens")
        largest = tokens_LE.max(axis=1) / np.maximum(tokens_LE.mean(axis=1), 1)
        metrics["policy/balance_loss"] = mean("balance_loss")
        metrics["policy/expert_load_max"] = largest.mean()
    # If the old log-probs are the rollout's, the first update measures the difference due to
    # arithmetic; with earlier weights it would not be arithmetic alone.
    tokens = history[0]["tokens"]
    if tokens and not stale:
        metrics["policy/rollout_train_logprob_gap"] = history[0]["logprob_gap"] / tokens
    for name, training in run.update_spec.trained.items():
        if prefix := training.prefix:
            metrics[f"{name}/loss"] = mean(f"{prefix}loss")
            metrics[f"{name}/grad_norm"] = mean(f"{prefix}grad_norm")
        metrics |= training.metrics(total)
    return metrics

"""Metrics of a step's updates, and those that were skipped."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from specrl_jax import hosts
from specrl_jax.algorithms.losses import policy_metrics
from specrl_jax.algorithms.scoring import PackedRows, held_slots
from specrl_jax.config import flatten
from specrl_jax.training.state import Run, RunState
from specrl_jax.types import Batch

# Stage → what its scalars begin with, the field of its learning rate.
_STAGES = {
    "policy": ("", "updates.learning_rate"),
    "critic": ("critic_", "critic.learning_rate"),
    "draft head": ("head_", "rollout.head.learning_rate"),
}


def drop_skipped_updates(
    run: Run, state: RunState, history: list[dict[str, np.ndarray]]
) -> list[dict[str, np.ndarray]]:
    """Return the scalars of the updates that were not skipped; count in `state` those in a row.

    Raises FloatingPointError in one line where weights, moments, loss or gradients are not finite,
    or `updates.skip_nonfinite` updates in a row were skipped.
    """
    fields = dict(flatten(run.config))
    made = []
    for scalars in history:
        stage, name = _first_nonfinite(scalars)
        if not name:
            made.append(scalars)
            state.skipped_in_row = 0
            continue
        prefix, field = _STAGES[stage]
        state.skipped_in_row += 1
        skippable = name in ("loss", "grad_norm")
        if not skippable or state.skipped_in_row >= fields["updates.skip_nonfinite"]:
            row = f", {state.skipped_in_row} updates in a row" if state.skipped_in_row > 1 else ""
            raise FloatingPointError(
                f"step {state.step}: {stage}: {name} is {scalars[prefix + name]}{row}; "
                f"lower {field}, now {fields[field]}"
            )
    return made


def _first_nonfinite(scalars: dict[str, np.ndarray]) -> tuple[str, str]:
    """Return (stage, name) of the first scalar that is not finite, or empty."""
    for name in ("loss", "grad_norm", "weight_norm", "moments"):
        for stage, (prefix, _) in _STAGES.items():
            if not np.isfinite(scalars.get(prefix + name, 0.0)):
                return stage, name
    return "", ""


@jax.jit
def count_packed(packed: PackedRows) -> tuple[Array, Array]:
    """Count the rows that have a token, and the slots that hold one."""
    return jnp.sum(packed.nodes[:, 0] >= 0), jnp.sum(held_slots(packed.sequences))


def packing_metrics(mini_batches: list[PackedRows], batch: Batch, passes: int) -> dict[str, float]:
    """Return what share of a batch its mini-batches compute, and how many tokens."""
    num_rows, tokens = zip(*hosts.fetch([count_packed(x) for x in mini_batches]), strict=True)
    slots = sum(hosts.fetch(x.count) * x.sequences.tokens[0].size for x in mini_batches)
    return {
        "update/signal_fraction": sum(num_rows) / len(batch.tokens),
        "update/computed_fraction": slots / batch.tokens.size,
        "update/tokens": passes * sum(tokens),
    }


def update_metrics(run: Run, history: list[dict[str, np.ndarray]]) -> dict[str, float]:
    """Return metrics of the step's updates, from each one's scalars; {} of none."""

    def mean(name: str) -> float:
        return np.mean([scalars[name] for scalars in history])

    def total(name: str) -> np.ndarray:
        return sum(scalars.get(name, 0) for scalars in history)

    if not history:
        return {}
    metrics = {"policy/loss": mean("loss"), "update/grad_norm": mean("grad_norm")}
    # Means over the tokens that are computed, where there are any.
    if total("tokens"):
        metrics |= policy_metrics(jax.tree.map(lambda *x: np.sum(x, axis=0), *history))
    if tokens := total("solution_tokens"):
        metrics["policy/solution_nll"] = total("solution_nll") / tokens
    if pairs := total("pairs"):
        metrics["policy/pair_loss"] = total("pair_loss") / pairs
        metrics["policy/pair_accuracy"] = total("pair_accuracy") / pairs
    if not run.update_spec.model.dense:
        tokens_LE = total("expert_tokens")
        largest = tokens_LE.max(axis=1) / np.maximum(tokens_LE.mean(axis=1), 1)
        metrics["policy/balance_loss"] = mean("balance_loss")
        metrics["policy/expert_load_max"] = largest.mean()
    # Where the old log-probs are the rollout's, the first update measures the difference.
    if tokens := history[0]["tokens"]:
        metrics["policy/rollout_train_logprob_gap"] = history[0]["logprob_gap"] / tokens
    if run.update_spec.critic:
        tokens = max(total("tokens"), 1)  # a batch may hold none
        metrics["critic/loss"] = mean("critic_loss")
        metrics["critic/clip_fraction"] = total("critic_clipped") / tokens
        metrics["critic/grad_norm"] = mean("critic_grad_norm")
    if run.update_spec.draft_head:
        tokens = max(total("head_tokens"), 1)
        metrics["draft_head/loss"] = mean("head_loss")
        metrics["draft_head/overlap"] = total("head_overlap")[0] / tokens
        metrics["draft_head/grad_norm"] = mean("head_grad_norm")
    return metrics

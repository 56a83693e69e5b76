"""Scene `rules`: how much of real older responses each acceptance rule keeps.

The policy of a config writes drafts, is trained for some GRPO steps more, and judges the same
drafts under every rule, with the likeliest tokens of π_old stored, in several steps' noise. Nothing
is timed.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from specrl_jax.benchmarks import timing as benchmark
from specrl_jax.benchmarks.trained import drift_of, scene_of, without_trees
from specrl_jax.build import build
from specrl_jax.rollout.generate import DraftInputs, Noise, generate

# rule, log ℓ, and what it emits.
RULES = (
    ("ratio", 0.5, "pulled to π_old"),
    ("ratio", 0.0, "pulled to π_old"),
    ("ratio_residual", 0.0, "π"),
    ("block", 0.0, "π"),
    ("match", 0.0, "π"),
)


def measure(
    config, *, log: Callable[[str], None], repeats: int = 5, drift: int | None = None
) -> dict[str, Any]:
    """The scene's record, for the mesh in use; repeats: steps whose noise judges the drafts."""
    config.rollout.draft, config.rollout.accept = "previous", "block"  # it keeps π_old's laws
    run, params = build(config)
    steps = drift_of(run) if drift is None else drift
    inputs, drafts, setting = scene_of(run, params, steps)
    lens, plan, rows = np.asarray(jax.device_get(drafts.lens)), without_trees(run.rollout_spec), []
    for rule, log_lenience, law in RULES:
        judged = dataclasses.replace(plan, program=dataclasses.replace(plan.program, accept=rule))
        kept = []
        for number in range(repeats):
            rollout = generate(
                judged,
                inputs.weights,
                inputs.prompts,
                Noise(inputs.key, inputs.step + number),
                drafts=DraftInputs(drafts, log_lenience),
            ).rollout
            kept.append(np.asarray(jax.device_get(rollout.prefix_lens)))
        kept = np.array(kept)
        name = f"{rule}, ℓ = {math.exp(log_lenience):.4g}" if rule == "ratio" else rule
        log(f"{name}: {kept.mean():.2f} tokens kept")
        rows.append(
            {
                "rule": name,
                "law": law,
                "kept": float(kept.mean()),
                "kept_of_draft": float(kept.sum() / (repeats * lens.sum())),
                "whole": float(np.mean(kept == lens)),
                "least": float(kept.mean(axis=1).min()),
                "most": float(kept.mean(axis=1).max()),
            }
        )
    setting |= {"repeats": repeats, "stored": plan.program.stored_logprobs}
    return {
        "config": jax.tree.map(benchmark.jsonable, config.to_dict()),
        "setting": setting,
        "rules": rows,
    }


def table(record: dict[str, Any]) -> str:
    """The scene as text."""
    setting = record["setting"]
    lines = [
        f"rules: {setting['policy']}, {setting['rows']} drafts of {setting['draft_len_mean']:.1f} "
        f"tokens from {setting['drift_steps']} GRPO steps ago; {setting['stored']} likeliest "
        f"tokens stored; noise of {setting['repeats']} steps",
        f"{'':24}{'emits':>18}{'tokens kept':>14}{'least-most':>16}{'of the draft':>14}"
        f"{'whole':>9}",
    ]
    for row in record["rules"]:
        spread = f"{row['least']:.2f}-{row['most']:.2f}"
        lines.append(
            f"{row['rule']:24}{row['law']:>18}{row['kept']:>14.2f}{spread:>16}"
            f"{row['kept_of_draft']:>14.1%}{row['whole']:>9.1%}"
        )
    return "\n".join(lines)

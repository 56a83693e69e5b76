"""Benchmark `rules`: what each acceptance rule keeps of drafts, and how fast a rollout is with it.

A config's policy writes drafts and is trained for some GRPO steps more. Then it responds to the
same prompts without drafts, and with them under every rule.
"""

import dataclasses
import functools
import math

import jax
import numpy as np

from specrl_jax import train
from specrl_jax.benchmarks.reports import Report, spread
from specrl_jax.benchmarks.timing import Log, RolloutCase, run_case
from specrl_jax.build import build
from specrl_jax.data.curriculum import PromptStream
from specrl_jax.models.transformer import Params, param_count, rollout_weights
from specrl_jax.rollout.acceptance import ACCEPTANCE_RULES
from specrl_jax.rollout.drafts.sources import DRAFT_SOURCES
from specrl_jax.rollout.engine.requests import DraftInputs
from specrl_jax.rollout.engine.spec import RolloutSpec
from specrl_jax.rollout.generate import Noise, generate
from specrl_jax.run import Run
from specrl_jax.run_log import RunLog
from specrl_jax.state import init_state
from specrl_jax.types import Drafts, Prompts

_LONGEST_DRIFT = 16  # steps


def measure_rules(config, log: Log, repeats: int, drift: int | None) -> Report:
    """Seconds and draft tokens kept by rule, with the noise of `repeats` steps.

    drift: GRPO steps between the policy that wrote the drafts and the one that is timed; None: an
    epoch, at most 16. Raises ValueError in one line.
    """
    config.rollout.draft = next(n for n, choice in DRAFT_SOURCES.items() if choice.previous)
    # Drafts then keep of π_old what any rule needs.
    config.rollout.accept = next(n for n, x in ACCEPTANCE_RULES.items() if x.needs_distribution)
    run, params = build(config)
    if drift is None:
        drift = min(len(run.prompts.lens) // config.rollout.prompts_per_step, _LONGEST_DRIFT)
    weights, prompts, drafts = _train_and_draft(run, params, drift)
    lens = jax.device_get(drafts.lens)
    rows = []
    plain = []
    for label, spec, inputs in _cases(run, drafts):
        case = functools.partial(generate, spec, weights, prompts, drafts=inputs)
        runs = _with_noises(case, run.key, drift + 2, repeats)
        plain = plain or runs
        kept = np.array([x.rollout.prefix_lens for x in runs])
        row = {"rule": label, "seconds": spread(x.seconds for x in runs)}
        row["over_plain"] = spread(a.seconds / b.seconds for a, b in zip(plain, runs))
        row["tokens_kept"] = spread(np.mean(kept, axis=1))
        row["kept_of_draft"] = float(np.sum(kept) / (repeats * lens.sum()))
        rows.append(row | {"kept_whole": float(np.mean(kept == lens))})
        log(f"{label}: {np.mean(kept):.2f} tokens kept")
    title = f"rules: {param_count(run.model) / 1e6:.2f}M parameters; {len(lens)} drafts of "
    title += f"{lens.mean():.1f} tokens, {drift} steps old; noise of {repeats} steps"
    return Report(title, rows)


def _train_and_draft(run: Run, params: Params, drift: int) -> tuple[Params, Prompts, Drafts]:
    """A policy, prompts, and responses of the policy that it was `drift` GRPO steps before."""
    state = init_state(run, params)
    size = run.config.rollout.prompts_per_step
    older = rollout_weights(run.model, state.train.params)
    with run.scorer.pool:
        for _ in range(drift):
            train.step(run, state, RunLog(run))
    prompts = PromptStream(run.prompts, size, run.config.seed).next()
    written = generate(run.rollout_spec, older, prompts, Noise(run.key, 1)).rollout
    return rollout_weights(run.model, state.train.params), prompts, Drafts.of(written)


def _cases(run: Run, drafts: Drafts) -> list[tuple[str, RolloutSpec, DraftInputs]]:
    """No drafts; every rule; and a lenient one with the config's lenience too."""
    cases = [("no drafts", run.rollout_spec, DraftInputs())]
    spec = run.rollout_spec
    for name, rule in ACCEPTANCE_RULES.items():
        of_rule = dataclasses.replace(spec, program=dataclasses.replace(spec.program, accept=rule))
        lenient = rule.lenient_share is not None
        chosen = run.config.rollout.lenience or 1.0
        for lenience in sorted({1.0, chosen}) if lenient else [1.0]:
            label = f"{name}, ℓ={lenience:.4g}" if lenient else name
            cases.append((label, of_rule, DraftInputs(drafts, math.log(lenience))))
    return cases


def _with_noises(case: RolloutCase, key: jax.Array, first: int, repeats: int) -> list:
    """Runs with the noise of steps from `first` on; one before them compiles."""
    steps = [first, *range(first, first + repeats)]
    return [run_case(functools.partial(case, noise=Noise(key, n))) for n in steps][1:]

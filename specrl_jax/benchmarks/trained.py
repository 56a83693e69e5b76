"""Benchmarks `trained` and `rules`: drafts of a policy that a config trains.

The policy writes drafts and is trained for some GRPO steps more. Then it responds to the same
prompts: for `trained` without drafts and with them, at several leniences where the config's rule
has one; for `rules` with the same drafts under every acceptance rule, untimed.
"""

import dataclasses
import functools
import math

import jax
import numpy as np

from specrl_jax import train
from specrl_jax.benchmarks.reports import Report, spread
from specrl_jax.benchmarks.rollout import by_prompt
from specrl_jax.benchmarks.timing import Case, Log, figures, make_speculation, run_in_turn
from specrl_jax.build import Trainer, build, policy_copy
from specrl_jax.data.curriculum import PromptStream
from specrl_jax.models.transformer import Params, param_count
from specrl_jax.rollout.acceptance import ACCEPTANCE_RULES
from specrl_jax.rollout.drafts.sources import DRAFT_SOURCES, DraftHistory
from specrl_jax.rollout.generate import DraftInputs, Noise, RolloutSpec, generate
from specrl_jax.state import init_state
from specrl_jax.types import Drafts, Prompts

_LONGEST_DRIFT = 16  # steps


@dataclasses.dataclass(frozen=True)
class Drafted:
    """A policy, and the responses of the policy that it was `drift` GRPO steps before."""

    weights: Params
    prompts: Prompts
    drafts: Drafts
    drift: int
    title: str


def measure_trained(config, log: Log, repeats: int, drift: int | None) -> Report:
    """Seconds of a rollout by draft and lenience, on the mesh in use.

    drift: GRPO steps between the policy that wrote the drafts and the one that is timed; None: an
    epoch, at most 16. Raises ValueError in one line.
    """
    trainer, params = build(config)
    drafted = train_and_draft(trainer, params, drift)
    runs = run_in_turn(_cases(trainer, drafted), repeats, log)
    rows, lens = [], jax.device_get(drafted.drafts.lens)
    for case, of_case in runs.items():
        kept = {"kept_of_draft": float(of_case[-1].rollout.prefix_lens.sum() / lens.sum())}
        rows.append({"drafts": case} | figures(of_case, plain=runs["none"]) | kept)
    return Report(f"trained: {drafted.title}; median (min-max) of {repeats}", rows)


def train_and_draft(trainer: Trainer, params: Params, drift: int | None) -> Drafted:
    settings = trainer.config.rollout
    if drift is None:
        drift = min(len(trainer.prompts.lens) // settings.prompts_per_step, _LONGEST_DRIFT)
    state = init_state(trainer, params)
    older = policy_copy(trainer.model, state.train.params)
    with trainer.scorer.pool:
        for _ in range(drift):
            train.step(trainer, state)
    weights = policy_copy(trainer.model, state.train.params)
    prompts = PromptStream(trainer.prompts, settings.prompts_per_step, trainer.config.seed).next()
    plain = without_trees(trainer.rollout_spec)
    written = generate(plain, older, prompts, Noise(trainer.key, 1)).rollout
    drafts = Drafts.of(written)
    lens, size = jax.device_get(written.lens), param_count(trainer.model) / 1e6
    title = f"{size:.2f}M parameters; {len(lens)} drafts of {lens.mean():.1f} tokens, "
    return Drafted(weights, prompts, drafts, drift, f"{title}{drift} steps old")


def without_trees(spec: RolloutSpec) -> RolloutSpec:
    """The same rollout one token a step."""
    program = dataclasses.replace(spec.program, draft_source=None)
    return dataclasses.replace(spec, program=program, max_width=1)


def _cases(trainer: Trainer, drafted: Drafted) -> dict[str, Case]:
    """Plain, then with all that the config drafts from, at several leniences if there are any."""
    settings, spec, drafts = trainer.config.rollout, trainer.rollout_spec, drafted.drafts
    inputs = drafted.weights, drafted.prompts, Noise(trainer.key, drafted.drift + 2)
    previous = drafts if DRAFT_SOURCES[settings.draft].previous else None
    history = None
    if spec.program.draft_history:
        tokens, lens = jax.device_get((drafts.tokens, drafts.lens))
        stored = by_prompt(tokens, lens, spec.group_size)
        history = DraftHistory.from_store(*stored, spec.group_size)
    leniences = {1.0}
    if previous is not None and spec.program.accept.lenient:
        leniences = {1.0, settings.lenience or 1.0, math.inf}
    cases = {"none": functools.partial(generate, without_trees(spec), *inputs)}
    for lenience in sorted(leniences):
        options = {"drafts": DraftInputs(previous, math.log(lenience), history)}
        if settings.adaptive:
            options["speculation"] = make_speculation(spec, len(drafts.lens))
        name = f"{settings.draft}, ℓ={lenience:.4g}"
        cases[name] = functools.partial(generate, spec, *inputs, **options)
    return cases


def measure_rules(config, log: Log, repeats: int, drift: int | None) -> Report:
    """Draft tokens kept by every rule, with the noise of `repeats` steps; see `measure_trained`."""
    config.rollout.draft = next(n for n, choice in DRAFT_SOURCES.items() if choice.previous)
    # Drafts then keep of π_old what any rule needs.
    config.rollout.accept = next(n for n, x in ACCEPTANCE_RULES.items() if x.needs_distribution)
    trainer, params = build(config)
    drafted = train_and_draft(trainer, params, drift)
    spec, rows = without_trees(trainer.rollout_spec), []
    lens = jax.device_get(drafted.drafts.lens)
    for name, rule in ACCEPTANCE_RULES.items():
        of_rule = dataclasses.replace(spec, program=dataclasses.replace(spec.program, accept=rule))
        for lenience in sorted({1.0, config.rollout.lenience or 1.0}) if rule.lenient else [1.0]:
            drafts, kept = DraftInputs(drafted.drafts, math.log(lenience)), []
            for number in range(repeats):
                noise = Noise(trainer.key, drafted.drift + 2 + number)
                inputs = (drafted.weights, drafted.prompts, noise)
                result = generate(of_rule, *inputs, drafts=drafts)
                kept.append(jax.device_get(result.rollout.prefix_lens))
            label = f"{name}, ℓ={lenience:.4g}" if rule.lenient else name
            log(f"{label}: {np.mean(kept):.2f} tokens kept")
            row = {"rule": label, "tokens_kept": spread(np.mean(kept, axis=1))}
            row["kept_of_draft"] = float(np.sum(kept) / (repeats * lens.sum()))
            rows.append(row | {"kept_whole": float(np.mean(np.array(kept) == lens))})
    return Report(f"rules: {drafted.title}; noise of {repeats} steps", rows)

"""Benchmark `rules`: how much of drafts each acceptance rule keeps, and the rollout's speed.

A config's policy writes drafts and is trained for some more GRPO steps. Then it responds to the
same prompts without drafts, and with them under every rule; rules that sample every token anew also
on the noise that wrote the drafts (exact reuse), as previous and as tree drafts.
"""

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from specrl_jax import train
from specrl_jax.benchmarks.rollout import Log, Report, TimedRollout, as_history, run_case, spread
from specrl_jax.compile import memory
from specrl_jax.data.curriculum import PromptStream
from specrl_jax.models.transformer import Params, param_count, rollout_weights
from specrl_jax.rollout.acceptance import ACCEPTANCE_RULES, MATCH, AcceptanceRule
from specrl_jax.rollout.drafts.sources import DRAFT_SOURCES, SuffixDrafts
from specrl_jax.rollout.generate import generate
from specrl_jax.rollout.requests import Requests
from specrl_jax.rollout.sampling import NoiseKey
from specrl_jax.rollout.spec import RolloutSpec
from specrl_jax.training.build import build, init_state
from specrl_jax.training.run import Run
from specrl_jax.training.run_log import RunLog
from specrl_jax.types import Drafts, Prompts, Rollout

_LONGEST_DRIFT = 16  # steps


@dataclasses.dataclass(frozen=True)
class _Case:
    """A way to respond to prompts that have earlier responses."""

    label: str
    spec: RolloutSpec
    drafted: bool = True
    keeps_noise: bool = False  # reuses the noise that wrote the drafts

    def drafts_of(self, written: Rollout) -> dict[str, Any]:
        """Return the fields of `Requests` that use earlier responses as drafts."""
        if not self.drafted:
            return {}
        if not self.spec.draft_source:
            return {"drafts": Drafts(written.tokens, written.lens)}
        tokens = np.asarray(written.tokens.ids)
        lens = np.asarray(written.lens)
        return {"history": as_history(tokens, lens, self.spec.group_size)}


def measure_rules(config, log: Log, repeats: int, drift: int | None) -> Report:
    """Measure seconds, draft tokens kept and row steps by rule.

    repeats: steps, each with drafts on its own noise.

    drift: GRPO steps between the policy that wrote the drafts and the one that is timed; None: an
    epoch, at most 16. Raises a one-line ValueError.
    """
    config.rollout.draft = next(
        n for n, choice in DRAFT_SOURCES.items() if choice.verifies_previous
    )
    # Drafts then keep everything about π_old that any rule needs.
    config.rollout.accept = next(n for n, x in ACCEPTANCE_RULES.items() if x.needs_distribution)
    run, params = build(config, memory.check)
    if drift is None:
        drift = min(len(run.prompts.lens) // config.rollout.prompts_per_step, _LONGEST_DRIFT)
    prompts = PromptStream(run.prompts, config.rollout.prompts_per_step, config.seed).next()
    steps = range(drift + 2, drift + 2 + repeats)
    written, weights = _write_and_train(run, params, prompts, steps, drift)
    lens = np.array([x.lens for x in written])

    def respond(case: _Case, step: int, written: Rollout) -> TimedRollout:
        noise = NoiseKey(run.key, step if case.keeps_noise else step + repeats)
        inputs = Requests(prompts, noise, **case.drafts_of(written))
        return run_case(functools.partial(generate, case.spec, weights, inputs))

    cases = list(_cases(run))
    for case in cases:
        respond(case, steps[0], written[0])
        log(f"{case.label}: compiled")
    # In turn, so that other work on the machine slows all of them alike.
    rounds = [[respond(case, step, x) for case in cases] for step, x in zip(steps, written)]
    rows = []
    for case, runs in zip(cases, zip(*rounds)):
        plain = [x[0].seconds for x in rounds]
        kept = np.array([x.rollout.prefix_lens for x in runs])
        row = {"rule": case.label, "seconds": spread(x.seconds for x in runs)}
        row["over_plain"] = spread(a / b.seconds for a, b in zip(plain, runs))
        row["row_steps"] = float(np.mean([x.stats.row_steps for x in runs]))
        row["tokens_kept"] = spread(np.mean(kept, axis=1))
        row["drafted"] = float(np.mean([x.stats.drafted_tokens for x in runs])) / lens.shape[1]
        row["kept_of_draft"] = float(np.sum(kept) / lens.sum())
        rows.append(row | {"kept_whole": float(np.mean(kept == lens))})
    title = f"rules: {param_count(run.model) / 1e6:.2f}M parameters; {lens.shape[1]} drafts of "
    title += f"{lens.mean():.1f} tokens, {drift} steps old; noise of {repeats} steps"
    return Report(title, rows)


def _write_and_train(
    run: Run, params: Params, prompts: Prompts, steps: Sequence[int], drift: int
) -> tuple[list[Rollout], Params]:
    """Return responses on the noise of each step, and rollout weights `drift` GRPO steps later."""
    state = init_state(run, params)
    older = rollout_weights(run.model, state.policy_weights(run.model))
    written = [
        generate(run.rollout_spec, older, Requests(prompts, NoiseKey(run.key, step))).rollout
        for step in steps
    ]
    with run.responder.pool:
        for _ in range(drift):
            train.step(run, state, RunLog(run))
    return written, rollout_weights(run.model, state.policy_weights(run.model))


def _cases(run: Run) -> Iterator[_Case]:
    """Yield no drafts; every rule, a lenient one also with the config's lenience; reused noise."""
    spec = run.rollout_spec

    def with_rule(rule: AcceptanceRule) -> RolloutSpec:
        stored = spec.stored_logprobs if rule.needs_distribution else 0
        return dataclasses.replace(spec, accept=rule, stored_logprobs=stored)

    yield _Case("no drafts", with_rule(MATCH), drafted=False)
    for name, rule in ACCEPTANCE_RULES.items():
        lenient = rule.lenience_dependent_share is not None
        chosen = run.config.rollout.lenience or 1.0
        for lenience in sorted({1.0, chosen}) if lenient else [1.0]:
            label = f"{name}, ℓ={lenience:.4g}" if lenient else name
            yield _Case(label, with_rule(rule.of(lenience)))
        if rule.samples_every_token:
            yield _Case(f"{name}, reused noise", with_rule(rule.of(1.0)), keeps_noise=True)
    settings = run.config.rollout
    source = SuffixDrafts.from_config(settings)
    width = settings.max_width
    tree = dataclasses.replace(with_rule(MATCH), draft_source=source, max_width=width)
    yield _Case("tree", tree)
    yield _Case("tree, reused noise", tree, keeps_noise=True)

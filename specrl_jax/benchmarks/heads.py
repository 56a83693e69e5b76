"""Benchmark `heads`: acceptance of a learned draft head's drafts, and the cost of training it.

A config's policy and its head are trained for some GRPO steps. Before and after them the policy
responds to the same prompts without drafts, and with the head's drafts: drawn with the policy's
noise, and greedily. Then the update is timed with and without the head. Timed cases run in turn.
Counts do not depend on the machine's noise.
"""

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from specrl_jax import train
from specrl_jax.algorithms.advantages import has_critic
from specrl_jax.algorithms.scoring import RowTokens, pack_rows
from specrl_jax.algorithms.update import make_batch, update
from specrl_jax.algorithms.update_spec import UpdateSpec
from specrl_jax.benchmarks.rollout import Log, Report, RolloutCase, run_case, seconds_of, spread
from specrl_jax.compile import memory
from specrl_jax.data.curriculum import PromptStream
from specrl_jax.models.transformer import param_count
from specrl_jax.rollout.engine.speculation import Speculation, StepPlan
from specrl_jax.rollout.generate import generate
from specrl_jax.rollout.requests import Requests
from specrl_jax.rollout.sampling import NoiseKey, SamplingConfig
from specrl_jax.rollout.spec import RolloutSpec
from specrl_jax.training.build import build, init_state
from specrl_jax.training.run import Run
from specrl_jax.training.run_log import RunLog
from specrl_jax.training.state import RunState
from specrl_jax.types import Prompts

_FRESH = 1_000_000  # the step whose noise is used: one that no training reaches


class _Widest(Speculation):
    """Uses the widest steps, and records what they accept."""

    matched: Any = 0  # int [W], row steps by accepted draft tokens

    def plan_steps(self, rows: int, widths: Sequence[int]) -> StepPlan:
        return StepPlan(widths[-1], 0, False)

    def record_steps(self, plan: StepPlan, steps: int, histogram: Sequence[float]) -> None:
        self.matched = self.matched + np.array(histogram)


def measure_heads(config, log: Log, repeats: int, drift: int) -> Report:
    """Measure tokens per pass, acceptance by position in the draft, row steps, and seconds.

    repeats: of timed rollouts and updates. drift: number of GRPO steps.
    """
    if has_critic(config.critic.kind):
        rule = "none: an update is timed without a critic's values"
        raise ValueError(f"critic.kind must be {rule}, got {config.critic.kind!r}")
    config.rollout.draft = "head"
    run, params = build(config, memory.check)
    prompts = PromptStream(run.prompts, config.rollout.prompts_per_step, config.seed).next()
    state = init_state(run, params)
    rows = []
    with run.responder.pool:
        for steps in sorted({0, drift}):
            while state.step < steps:
                train.step(run, state, RunLog(run))
                log(f"step {state.step} of {drift}")
            rows += _accepted(run, state, prompts, repeats)
    rows += _update_seconds(run, state, prompts, repeats)
    title = f"heads: {param_count(run.model) / 1e6:.2f}M parameters, "
    return Report(f"{title}{config.rollout.head.vocab or 'all'} tokens to draft", rows)


def _accepted(
    run: Run, state: RunState, prompts: Prompts, repeats: int
) -> Iterator[dict[str, Any]]:
    """Yield a row for each kind of draft."""
    weights = state.rollout_weights(run)
    inputs = Requests(prompts, NoiseKey(run.key, _FRESH))
    sampling = run.rollout_spec.sampling
    heads = {"no drafts": None, "coupled": sampling, "greedy": SamplingConfig(temperature=0)}
    cases = {}
    for label, head in heads.items():
        spec = _spec(run, head, run.rollout_spec.max_width if head else 1)
        cases[label] = RolloutCase(generate, spec, weights, inputs, speculation=_Widest())
        run_case(cases[label])  # compiles
    rounds = [[run_case(case) for case in cases.values()] for _ in range(repeats)]
    plain = rounds[0][0]
    for index, (label, case) in enumerate(cases.items()):
        timed = [times[index] for times in rounds]
        row = {"step": state.step, "drafts": label, "row_steps": timed[0].stats.row_steps}
        differ = np.any(timed[0].rollout.tokens.ids != plain.rollout.tokens.ids, axis=1)
        row["rows_that_differ"] = int(np.sum(differ))
        row["seconds"] = spread(x.seconds for x in timed)
        against = [x.seconds / times[0].seconds for x, times in zip(timed, rounds)]
        row["times_as_long"] = spread(against)
        if heads[label]:
            matched = case.keywords["speculation"].matched
            at_least = np.cumsum(matched[::-1])[::-1]  # row steps that accept >= 0, 1, ... tokens
            row["tokens_a_pass"] = float(np.sum(at_least) / at_least[0])
            for k in range(1, len(at_least)):  # the share of those that accept all before it
                row[f"draft_{k}"] = float(at_least[k] / max(at_least[k - 1], 1))
        yield row


def _spec(run: Run, head: SamplingConfig | None, width: int) -> RolloutSpec:
    return dataclasses.replace(run.rollout_spec, draft_head=head, max_width=width)


def _update_seconds(
    run: Run, state: RunState, prompts: Prompts, repeats: int
) -> Iterator[dict[str, Any]]:
    """Yield the seconds of one update of all rows without the head, and with it, run in turn."""
    inputs = Requests(prompts, NoiseKey(run.key, 0))
    result = generate(_spec(run, None, 1), state.rollout_weights(run), inputs)
    batch = make_batch(prompts, result.rollout)
    rows = np.arange(run.config.updates.mini_batch_size)
    packed = pack_rows(run.update_spec, RowTokens.fetch(batch), rows)

    def seconds(update_spec: UpdateSpec) -> float:
        own = jax.tree.map(jnp.copy, state.policy_state)  # an update consumes its state
        if update_spec.draft_head is None:
            own = dataclasses.replace(own, draft_head=None)
        jax.block_until_ready(own)
        return seconds_of(
            lambda: update(
                update_spec, own, batch, packed, base_params=state.base_params(run.model)
            )
        )

    without = dataclasses.replace(run.update_spec, draft_head=None)
    cases = [functools.partial(seconds, spec) for spec in (without, run.update_spec)]
    for case in cases:
        case()
    rounds = [[case() for case in cases] for _ in range(repeats)]
    for label, times in zip(("update without the head", "update with it"), zip(*rounds)):
        over = spread(own / base for own, (base, _) in zip(times, rounds))
        yield {"drafts": label, "seconds": spread(times), "times_as_long": over}

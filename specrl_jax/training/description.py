"""Lines printed at a run's start: what was loaded, what was left out, and likely mistakes."""

import math
from collections.abc import Iterator

import jax

from specrl_jax.algorithms.advantages import has_critic
from specrl_jax.models import lora
from specrl_jax.models.transformer import param_count
from specrl_jax.rollout.spec import RolloutSpec
from specrl_jax.training.choices import trained_group_size
from specrl_jax.training.run import Run
from specrl_jax.training.state import RunState


def describe(run: Run) -> None:
    """Print what was loaded, and everything that was left out."""
    count = f"{param_count(run.model) / 1e6:.2f}M parameters, {run.model.dtype}"
    if run.model.lora:
        count += f", plus {lora.adapter_count(run.model) / 1e6:.2f}M trained in adapters"
    print(f"policy: {count}; mesh {dict(jax.sharding.get_mesh().shape)}")
    if line := run.batches_type.describe(run):
        print(line)
    held_out = sum(real for _, real in run.held_out)
    dropped = run.prompts.dropped
    dataset = run.dataset
    empty = f"{dataset.empty} without a question, " if dataset.empty else ""
    print(
        f"data: {len(run.prompts.lens)} training prompts ({empty}{dataset.duplicates} "
        f"duplicates and {dropped} longer than data.prompt_len left out), {held_out} held out; "
        f"{_steps_per_epoch(run)}, {run.total_steps} in all",
        flush=True,
    )
    config = run.config
    if run.rollout_spec.sampling.truncates and not config.algorithm.keep_sampling_mask:
        print(
            "update: log-probs are over all tokens, but top-k and top-p sample from fewer; with "
            "rollout.top_k, algorithm.keep_sampling_mask=True restricts them to those sampled from",
            flush=True,
        )
    for line in cautions(run.config, run.rollout_spec, run.total_steps):
        print(f"warning: {line}", flush=True)
    if run.prompts.spelled:
        print(
            f"data: {run.prompts.spelled} training prompts spell out control tokens, which are "
            "encoded as text: only the chat template writes control tokens",
            flush=True,
        )


def _steps_per_epoch(run: Run) -> str:
    steps = len(run.prompts.lens) / run.config.rollout.prompts_per_step
    text = f"{round(steps, 2):g} steps per epoch"
    if not steps.is_integer():
        text += ", where the last step starts the next epoch"
    return text


def cautions(config, spec: RolloutSpec, total_steps: int) -> Iterator[str]:
    """Yield a line for each setting that is allowed but leaves part of the run without effect."""
    settings = config.rollout
    one_token = "leaves one token at each position, so a group's responses are identical; set it to"
    if settings.top_k == 1:
        yield f"rollout.top_k = 1 {one_token} 0"
    # The likeliest of V tokens has a probability of at least 1 / V.
    elif settings.top_p <= 1 / spec.model.vocab_size:
        yield f"rollout.top_p = {settings.top_p:g} {one_token} 1"
    ramps = [("updates", "policy", policy_updates(config, total_steps))]
    if has_critic(config.critic.kind):
        ramps.append(("critic", "critic", total_steps * updates_per_step(config)))
    for section, whose, count in ramps:
        ramp = config[section].lr_warmup_steps
        if ramp and ramp >= count:
            peak = config[section].learning_rate
            yield (
                f"{section}.lr_warmup_steps = {ramp} covers all {count} updates of the {whose}: "
                f"its learning rate ends at {count / ramp * peak:.3g} of {peak:g}; lower it"
            )


def updates_per_step(config) -> int:
    """Return the optimizer updates of a step."""
    rows = config.rollout.prompts_per_step * trained_group_size(config)
    return config.updates.passes * (rows // config.updates.mini_batch_size)


def critic_only_steps(config) -> int:
    """Return how many of the first steps train only the critic, not the policy."""
    return config.critic.critic_only_steps if has_critic(config.critic.kind) else 0


def policy_updates(config, total_steps: int) -> int:
    """Return how many policy updates a run of this many steps makes."""
    return max(total_steps - critic_only_steps(config), 1) * updates_per_step(config)


def rate_jump(run: Run, state: RunState) -> str:
    """Return a line if the learning rate does not continue as planned."""
    if state.rates is None:
        return ""
    last, planned = state.rates
    now = float(run.schedule(state.updates))
    if math.isclose(now, planned, rel_tol=1e-3):
        return ""
    schedule = run.config.updates.lr_schedule
    return (
        f"warning: the learning rate jumps from {last:.3g} in the last update to {now:.3g} in the "
        f"next, not to {planned:.3g} as planned: updates.lr_schedule = {schedule} now spans "
        f"{run.total_steps} steps"
    )

"""Classes that the configuration selects: the core's own, or a recipe's."""

from collections.abc import Callable
from typing import Any

from specrl_jax import registry
from specrl_jax.responses import Responder
from specrl_jax.rollout.generate import RolloutResult
from specrl_jax.training.batches import BatchSource
from specrl_jax.training.collect import Collector
from specrl_jax.training.stage import Stage
from specrl_jax.training.stages import (
    Advantages,
    ImportanceWeights,
    Logprobs,
    SamplingMask,
    WholeResponses,
)


def collector_of(config) -> type[Collector]:
    return registry.chosen(config, "COLLECTOR", Collector)


def roll_out_of(config, responder: Responder) -> Callable[..., RolloutResult]:
    """Return the function that generates training rollouts, called like `Responder.roll_out`."""
    recipe = registry.chosen(config, "ROLL_OUT", None)
    return recipe.from_config(config) if recipe else responder.roll_out


def batch_source_of(config) -> type[BatchSource]:
    return registry.chosen(config, "BATCH_SOURCE", BatchSource)


def frozen_of(config) -> Any:
    """Return the loader of frozen weights, with `load` and `shape`; None if there are none."""
    return registry.chosen(config, "FROZEN", None)


def kept_logprobs(config) -> int:
    """Return how many of the likeliest tokens rollouts keep at each position for recipes."""
    return max(
        (x.kept_logprobs(config) for x in registry.all_chosen(config, "LOSS_TERM")), default=0
    )


def stages_of(config) -> list[type[Stage]]:
    """Return the stages of a batch, in order."""
    own = [SamplingMask, Advantages, WholeResponses, ImportanceWeights]
    asked = registry.all_chosen(config, "STAGE")
    first = [stage for stage in asked if not stage.after_logprobs]
    last = [stage for stage in asked if stage.after_logprobs]
    own = [stage for stage in own if stage.asked_by(config)]
    return own + first + [Logprobs] * bool(Logprobs.asked_by(config)) + last


def trained_group_size(config) -> int:
    """Return how many responses of a group are used for training."""
    return collector_of(config).trained_group_size(config)

"""All fields of a run and the rules between them, as declared by the subpackages and recipes.

Each subpackage has a file `settings.py` with its sections (`config.fields.Section`) and `RULES`.
A recipe may have `SECTIONS`, `RULES`, `EFFECTS` and `RENAMED`, see `recipes`.
"""

import collections
import functools
import itertools
from collections.abc import Iterator

from specrl_jax import registry
from specrl_jax.agents import settings as agents
from specrl_jax.algorithms import settings as algorithms
from specrl_jax.config.fields import Check, Values
from specrl_jax.config.schema import Schema
from specrl_jax.data import settings as data
from specrl_jax.models import settings as models
from specrl_jax.rewards import settings as rewards
from specrl_jax.rollout import settings as rollout
from specrl_jax.training import settings as training

SECTIONS = (
    training.RUN,
    models.MODEL,
    models.LORA,
    data.TOKENIZER,
    data.TEMPLATE_OPTIONS,
    data.DATA,
    data.DATA_OPTIONS,
    rewards.REWARD,
    rollout.ROLLOUT,
    rollout.TREE_DRAFTS,
    rollout.HEAD_DRAFTS,
    agents.ENVIRONMENT,
    algorithms.ALGORITHM,
    algorithms.MASK,
    algorithms.CRITIC,
    data.CURRICULUM,
    algorithms.UPDATES,
    training.TRAIN,
    training.WARMUP,
    training.EVALUATE,
    training.CHECKPOINT,
    training.LOG,
    training.MESH,
)
ROOMS = (models, data, rewards, rollout, agents, algorithms, training)


def _trained_group_size(config) -> int:
    """Return how many responses of a group are used for training."""
    collector = registry.chosen(config, "COLLECTOR", None)
    return collector.trained_group_size(config) if collector else config.rollout.group_size


def _batches(config: Values) -> Iterator[Check]:
    """Yield the rules on what a rollout passes to the updates."""
    rows = config.rollout.prompts_per_step * _trained_group_size(config)
    mini = config.updates.mini_batch_size
    yield (
        "updates.mini_batch_size",
        f"a divisor of the {rows} responses that a step trains on "
        "(rollout.prompts_per_step x rollout.group_size)",
        rows % mini == 0,
    )
    updates = rows // mini * config.updates.passes
    rule = f"rollout or recompute where a rollout feeds {updates} updates (their ratio is not 1)"
    one_update = config.meaning("updates.old_logprobs").one_update
    yield "updates.old_logprobs", rule, updates == 1 or not one_update


# Rules between subpackages that must not import each other.
RULES = (_batches,)


def schema() -> Schema:
    """Return the fields and rules of all subpackages and recipes."""
    return _schema(registry.loaded())


@functools.cache
def _schema(own_recipes: tuple[str, ...]) -> Schema:
    chain = itertools.chain.from_iterable
    own = [room.RULES for room in ROOMS]
    return Schema(
        sections=[*SECTIONS, *chain(registry.declared("SECTIONS"))],
        rules=[*RULES, *chain(own), *chain(registry.declared("RULES"))],
        effects=registry.declared("EFFECTS"),
        renamed=collections.ChainMap(
            *(getattr(room, "RENAMED", {}) for room in ROOMS), *registry.declared("RENAMED")
        ),
    )

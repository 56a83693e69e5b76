"""Fields of multi-turn episodes."""

from collections.abc import Iterator

from specrl_jax.config.fields import Check, Section, Values, When, field
from specrl_jax.config.kinds import BELOW_ONE, TEXT, integer, one_of

TURNS = When("environment.name", lambda c: c.environment.name, "guess")


# fmt: off
ENVIRONMENT = Section("environment", "several turns: see configs/multiturn.py", (
    field("name", "", '"" (one turn) | guess | calculator | python | see docs/agents.md', TEXT),
    field("max_turns", 4, "responses per episode, together within rollout.response_len",
          integer(1), neutral=1),
    field("allow_unfinished", 0.5, "share of episodes that may still wait when the rest continue",
          BELOW_ONE, neutral=0.0),
    field("on_timeout", "end", "a step takes too long: end (the episode) | tell (the policy)",
          one_of("end", "tell"), neutral="end"),
), on=TURNS)
# fmt: on


def _environment(config: Values) -> Iterator[Check]:
    if config.meaning("data.source").plays:
        name = f"{config.data.source}:{config.data.name}"
        rule = f"{name} where data.source is {config.data.source} and data.name {config.data.name}"
        yield "environment.name", rule, config.environment.name == name
    if not config.environment.name:
        return
    accept = config.meaning("rollout.accept")
    previous = config.meaning("rollout.draft").verifies_previous
    rule = "another rule where environment.name is set (a random part of an episode is not a turn)"
    yield "rollout.accept", rule, not (previous and accept.cuts_draft)


RULES = (_environment,)

"""Responder of episodes: an environment replies to turns and gives their rewards."""

import dataclasses
from collections.abc import Callable
from typing import Any

from specrl_jax import hosts
from specrl_jax.agents.environment_pool import EnvironmentPool
from specrl_jax.agents.environment_protocol import StepResult
from specrl_jax.agents.episodes import Episodes, PlayedResult
from specrl_jax.agents.turns import EpisodeRollout
from specrl_jax.models.transformer import Params
from specrl_jax.responses import CompletedGroups, Responder, Responses
from specrl_jax.rewards.reading import Reading
from specrl_jax.rewards.thoughts import ThoughtTags
from specrl_jax.rollout.engine.speculation import Speculation
from specrl_jax.rollout.requests import Requests
from specrl_jax.rollout.spec import RolloutSpec
from specrl_jax.rollout.stop_strings import StopStrings
from specrl_jax.telemetry.metrics import Stopwatch
from specrl_jax.text.chat_template import changed_turns
from specrl_jax.text.tokenizer import Tokenizer
from specrl_jax.types import Prompts


@dataclasses.dataclass(frozen=True)
class EpisodeResponder(Responder):
    """Plays an episode in each row; its pool is an `EnvironmentPool`."""

    max_turns: int = 1  # of an episode
    # Largest share of unfinished episodes that a round does not wait for, [0, 1).
    allow_unfinished: float = 0.0
    # Called with what is said in an episode, by row: turns as they end, and replies.
    watch: Callable[[int, Reading | StepResult], None] | None = None

    def roll_out(
        self,
        spec: RolloutSpec,
        weights: Params,
        requests: Requests,
        *,
        speculation: Speculation | None = None,
        clock: Stopwatch,
    ) -> PlayedResult:
        """Play the episodes. Arguments: see `Responder.roll_out`.

        clock: also records the seconds of waiting for environments, as time/environment.
        """
        with clock.timed("time/rollout"):
            rollout = EpisodeRollout(spec, weights, requests, speculation)
        return Episodes(self, requests.prompts, rollout, clock).play()

    def score(
        self, spec: RolloutSpec, prompts: Prompts, taken: CompletedGroups, clock: Stopwatch
    ) -> Responses:
        """Return the episodes, which are all over, with their rewards."""
        played = taken.result
        tokens, lens = hosts.fetch((played.rollout.tokens.ids, played.rollout.lens))
        return Responses(
            prompts,
            taken.groups,
            played.rollout,
            played.stats,
            tokens,
            lens,
            played.draft_lens,
            played.rewards,
            played.ended,
            played.turns,
        )


def make_episode_responder(
    config, limits: dict[str, Any], common: dict[str, Any]
) -> EpisodeResponder:
    """Make the responder for the environment of `config`.

    limits: of a pool. common: fields of every `Responder`, except the pool.
    """
    environment = config.environment
    pool = EnvironmentPool(
        environment.name,
        extract=config.reward.extract,
        on_timeout=environment.on_timeout,
        **limits,
    )
    tokenizer = common["tokenizer"]
    _describe_environment(config, pool, tokenizer, common["thought_tags"])
    if pool.call_end:
        _check_calls(config, pool.call_end, tokenizer, common["stop"])
    return EpisodeResponder(
        pool,
        **common,
        call_end=pool.call_end,
        max_turns=environment.max_turns,
        allow_unfinished=environment.allow_unfinished,
    )


def _describe_environment(
    config, pool: EnvironmentPool, tokenizer: Tokenizer, tags: ThoughtTags
) -> None:
    """Print which turns a template changes, and whether episodes that are cut short get nothing."""
    source = config.tokenizer.source or config.model.source
    if changed := changed_turns(tokenizer, source, tags.pairs):
        print(f"environment: {changed}", flush=True)
    if pool.pays_at_end and not pool.scores:
        print(
            f"environment: {config.environment.name} pays at the end of an episode and cannot "
            "score it earlier: one that environment.max_turns or rollout.response_len ends has no "
            "reward",
            flush=True,
        )


def _check_calls(config, call_end: str, tokenizer: Tokenizer, stop: StopStrings | None) -> None:
    """Print if a turn continues after a call; raise ValueError if the tools see no calls."""
    name = config.environment.name
    if tokenizer.is_special(call_end) and not config.reward.keep_special_tokens:
        raise ValueError(
            f"reward.keep_special_tokens must be True where {call_end} of environment.name={name} "
            "is a special token, got False"
        )
    strings = stop.strings if stop else ()
    if not any(call_end in string or string in call_end for string in strings):
        print(
            f"environment: {name} has tools, but no text of rollout.stop ends a turn at "
            f"{call_end}: a turn continues after a call; set --config.rollout.stop='{call_end}'",
            flush=True,
        )

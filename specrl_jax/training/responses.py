"""Responses and their rewards: a `Responder` rolls prompts out and scores what comes back.

Takes prompts and weights, gives `Responses`. With an environment a response is a whole episode
(`episodes`).
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence

import numpy as np

from specrl_jax import hosts
from specrl_jax.agents.environment_pool import EnvironmentPool
from specrl_jax.agents.environment_protocol import StepResult
from specrl_jax.agents.episodes import Episodes, Turns, problems_of
from specrl_jax.agents.turns import EpisodeRollout
from specrl_jax.data.tokenizer import Tokenizer
from specrl_jax.models.transformer import Params
from specrl_jax.rewards.pool import RewardPool, Rewards
from specrl_jax.rewards.reading import Reading
from specrl_jax.rewards.sums import RewardSum
from specrl_jax.rewards.thoughts import ThoughtTags
from specrl_jax.rollout.engine.speculation import Speculation
from specrl_jax.rollout.forks import generate_forked
from specrl_jax.rollout.generate import RolloutInputs, RolloutResult, RolloutSpec, generate
from specrl_jax.rollout.stop_strings import StopStrings
from specrl_jax.telemetry.metrics import Stopwatch
from specrl_jax.types import Drafts, Prompts, Rollout

MAX_TAG = 32  # tokens at the end of a prompt, in which a tag and blanks after it find room


@dataclasses.dataclass(frozen=True)
class Responses:
    """B = Q·G finished responses to Q prompts, G in a row for each, with their rewards."""

    prompts: Prompts  # [Q]; rows beyond theirs are padding
    result: RolloutResult
    tokens: np.ndarray  # int32 [B, R]
    lens: np.ndarray  # int32 [B]
    rewards: Rewards
    ended: np.ndarray  # bool [B], rows that came to an end; the length cut the others
    turns: Turns | None = None  # of episodes
    # The rows' last responses before these, int32 [B, R], and their lengths.
    previous: tuple[np.ndarray, np.ndarray] | None = None
    on_kept_noise: np.ndarray | None = None  # bool [B], rows on noise that an earlier rollout had

    @property
    def rollout(self) -> Rollout:
        return self.result.rollout

    def with_previous(self, previous: Drafts, on_kept_noise: np.ndarray) -> "Responses":
        """Return the responses with the rows' last responses and their noise marks.

        previous: the last responses of all rows that the rollout was given.
        on_kept_noise: bool [Q, G], rows on noise that an earlier rollout had.
        """
        tokens, lens = hosts.fetch((previous.tokens, previous.lens))
        row_ids = self.result.row_ids
        kept = on_kept_noise.reshape(-1)
        return dataclasses.replace(
            self, previous=(tokens[row_ids], lens[row_ids]), on_kept_noise=kept
        )

    @property
    def group_size(self) -> int:
        return self.result.group_size

    @property
    def num_rows(self) -> int:
        """Rows of the prompts, without padding."""
        return len(self.prompts.lens) * self.group_size

    @property
    def group_rewards(self) -> np.ndarray:
        """float32 [Q, G]"""
        return self.rewards.rewards[: self.num_rows].reshape(-1, self.group_size)


def mean_by_function(rollouts: Sequence[Responses]) -> dict[str, float]:
    """Mean reward of each function of a sum, before its weight; without padding."""
    means = {}
    for name in rollouts[0].rewards.by_function:
        rewards = [x.rewards.by_function[name][: x.num_rows] for x in rollouts]
        means[name] = float(np.concatenate(rewards).mean(dtype=np.float64))
    return means


@dataclasses.dataclass(frozen=True)
class Responder:
    """Rolls prompts out and scores the responses: one turn each, or episodes."""

    pool: RewardPool | RewardSum | EnvironmentPool
    tokenizer: Tokenizer
    keep_special_tokens: bool = False  # in texts, but for the end of a response
    thought_tags: ThoughtTags = dataclasses.field(default_factory=ThoughtTags)
    stop: StopStrings | None = None  # texts that end a turn
    keep_stop: bool = True  # texts hold the one that ended them
    call_end: str = ""  # of the environment's tools: texts hold it in any case
    max_turns: int = 0  # of an episode with the environment of the pool; 0: there is none
    # Largest share of unfinished episodes that a round does not wait for, [0, 1).
    allow_unfinished: float = 0.0
    # Is told of what is said in an episode, by its row: turns as they end, and answers.
    watch: Callable[[int, Reading | StepResult], None] | None = None

    def respond(
        self,
        spec: RolloutSpec,
        weights: Params,
        inputs: RolloutInputs,
        *,
        speculation: Speculation | None = None,
        clock: Stopwatch | None = None,
    ) -> Responses:
        """Roll prompts out and score the responses. Arguments: see `generate`.

        clock: gets the seconds of the rollouts and of the rewards, as time/rollout and time/reward,
          and of these the seconds that environments were waited for, as time/environment.
        """
        clock = clock or Stopwatch()
        prompts = inputs.prompts
        if self.max_turns:
            with clock.timed("time/rollout"):
                rollout = EpisodeRollout(spec, weights, inputs, speculation=speculation)
            episodes = Episodes(self, prompts, rollout, clock)
            result, rewards, turns = episodes.play()
            tokens, lens = hosts.fetch((result.rollout.tokens, result.rollout.lens))
            return Responses(prompts, result, tokens, lens, rewards, ~episodes.cut, turns)
        roll_out = generate_forked if spec.forks else generate
        with clock.timed("time/rollout"):
            result = roll_out(spec, weights, inputs, speculation=speculation)
            tokens, lens = hosts.fetch((result.rollout.tokens, result.rollout.lens))
        with clock.timed("time/reward"):
            prompts = prompts.select(result.groups)
            ended = spec.ended(tokens, lens)
            in_thought = np.repeat(self.begins_thoughts(prompts), result.group_size)
            rows = [row[:n] for row, n in zip(tokens, lens)]
            readings = [self.read(*row) for row in zip(rows, ended, in_thought, strict=True)]
            texts, parts, ends = (list(column) for column in zip(*readings))
            problems = problems_of(prompts, range(len(lens)), len(lens))
            rewards = self.score(texts, *problems, parts, ends)
        return Responses(prompts, result, tokens, lens, rewards, ended)

    def read(self, ids: np.ndarray, ended: bool = True, in_thought: bool = False) -> Reading:
        """Read a response, or a turn of an episode: token ids int [n].

        ended: False where the length cut it. in_thought: what precedes it has opened a thought.
        """
        text = self.text(ids)
        return Reading(text, self.thought_tags.answer_part(text, in_thought), bool(ended))

    def text(self, ids: np.ndarray) -> str:
        """Decode what rewards see of a response, int [n]."""
        ids = ids.tolist()
        if ids and ids[-1] in self.tokenizer.eos_ids:
            ids.pop()
        decode = functools.partial(self.tokenizer.decode, keep_special=self.keep_special_tokens)
        if self.stop is None:
            return decode(ids)
        return self.stop.cut(ids, decode, self.keep_stop, self.call_end)

    def begins_thoughts(self, prompts: Prompts) -> np.ndarray:
        """Mark the Q prompts that leave a thought open: at the end, or in what is continued."""
        return np.array([self._begins_thought(prompts, q) for q in range(len(prompts.lens))], bool)

    def _begins_thought(self, prompts: Prompts, q: int) -> bool:
        prompt = prompts.examples[q].prompt
        if not isinstance(prompt, str) and prompt[-1]["role"] == "assistant":
            return self.thought_tags.is_open(prompt[-1]["content"])
        return self.opens_thought(prompts.tokens[q, : prompts.lens[q]].tolist())

    def opens_thought(self, ids: Sequence[int]) -> bool:
        """Return whether token ids open a thought at their end: of a prompt, or of an answer."""
        end = self.tokenizer.decode(ids[-MAX_TAG:], keep_special=True)
        return self.thought_tags.has_begun(end)

    def score(self, texts: Sequence, *problems: list) -> Rewards:
        """Return the pool's rewards; every process scores a part and gets those of the others.

        An error of a pool in one process is raised in all.
        """
        part = hosts.own_part(len(texts))
        own = functools.partial(self.pool.score, texts[part], *(x[part] for x in problems))
        return Rewards.joined(hosts.gather_results(own))

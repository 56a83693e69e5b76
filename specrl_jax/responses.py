"""Responses and their rewards: a `Responder` generates responses to prompts and scores them.

Takes requests and weights, returns `Responses`. Agents have their own responder.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from specrl_jax import hosts
from specrl_jax.models.transformer import Params
from specrl_jax.rewards.pool import Rewards
from specrl_jax.rewards.reading import Reading
from specrl_jax.rewards.thoughts import ThoughtTags
from specrl_jax.rollout.engine.runner import Stats
from specrl_jax.rollout.engine.speculation import Speculation
from specrl_jax.rollout.generate import RolloutResult, generate
from specrl_jax.rollout.requests import Requests
from specrl_jax.rollout.rows import rows_of, take
from specrl_jax.rollout.spec import RolloutSpec
from specrl_jax.rollout.stop_strings import StopStrings
from specrl_jax.telemetry.metrics import Stopwatch
from specrl_jax.text.tokenizer import Tokenizer
from specrl_jax.types import Prompts, Rollout

MAX_TAG = 32  # tokens at the end of a prompt that may contain a tag and the blanks after it


class Turns(NamedTuple):
    """Turns of B episodes, of at most K turns each."""

    rewards: np.ndarray  # float32 [B, K], sum to the episode's reward; 0 after the last turn
    ends: np.ndarray  # int32 [B, K], response tokens up to a turn's end; 0 for none
    roles: np.ndarray  # str [B, K], role of the environment's reply to a turn; "" without a reply

    @property
    def counts(self) -> np.ndarray:
        """int [B], turns of each episode."""
        return np.count_nonzero(self.ends, axis=1)


class CompletedGroups(NamedTuple):
    """Groups of a rollout that are complete and can be scored."""

    groups: np.ndarray  # int [n], among those of the rollout
    result: RolloutResult  # of all groups

    def select(self, prompts: Prompts) -> tuple[Prompts, RolloutResult]:
        """Return the groups' part of the prompts, and of the result."""
        if np.array_equal(self.groups, np.arange(len(prompts.lens))):
            return prompts, self.result
        rows = rows_of(self.groups, len(self.result.finished) // len(prompts.lens))
        result = dataclasses.replace(
            self.result,
            rollout=take(self.result.rollout, rows),
            finished=self.result.finished[rows],
            draft_lens=self.result.draft_lens[rows],
        )
        return prompts.select(self.groups), result


@dataclasses.dataclass(frozen=True)
class Responses:
    """B = Q·G finished responses to Q prompts, G in a row for each, with their rewards."""

    prompts: Prompts  # [Q]; further rows are padding
    groups: np.ndarray  # int [B / G], the groups' indices in the rollout
    rollout: Rollout
    stats: Stats
    tokens: np.ndarray  # int32 [B, R]
    lens: np.ndarray  # int32 [B]
    draft_lens: np.ndarray  # int32 [B], tokens of each row's draft
    rewards: Rewards
    ended: np.ndarray  # bool [B], rows that finished; the others were cut by the length limit
    turns: Turns | None = None  # of episodes
    # The rows' previous responses, int32 [B, R], and their lengths.
    previous: tuple[np.ndarray, np.ndarray] | None = None
    on_reused_noise: np.ndarray | None = None  # bool [B], rows whose noise an earlier rollout used

    @property
    def row_ids(self) -> np.ndarray:
        """Row indices in the rollout, int32 [B]."""
        return rows_of(self.groups, self.group_size)

    @property
    def group_size(self) -> int:
        return len(self.lens) // len(self.groups)

    @property
    def num_rows(self) -> int:
        """Rows of the prompts, without padding."""
        return len(self.prompts.lens) * self.group_size

    @property
    def group_rewards(self) -> np.ndarray:
        """float32 [Q, G]"""
        return self.rewards.rewards[: self.num_rows].reshape(-1, self.group_size)


def mean_by_function(rollouts: Sequence[Responses]) -> dict[str, float]:
    """Mean unweighted reward of each function of a sum; without padding."""
    means = {}
    for name in rollouts[0].rewards.by_function:
        rewards = [x.rewards.by_function[name][: x.num_rows] for x in rollouts]
        means[name] = float(np.concatenate(rewards).mean(dtype=np.float64))
    return means


def problems_of(prompts: Prompts, rows: Sequence[int], total: int) -> tuple[list, list, list]:
    """Return answers, tasks and metadata of these rows, out of `total` rows."""
    group_size = total // len(prompts.examples)
    examples = [prompts.examples[row // group_size] for row in rows]
    return (
        [example.answer for example in examples],
        [example.task for example in examples],
        [example.metadata for example in examples],
    )


@dataclasses.dataclass(frozen=True)
class Responder:
    """Rolls prompts out and scores the responses."""

    pool: Any  # scores responses: a `RewardPool`, a `RewardSum`, or that of a subclass
    tokenizer: Tokenizer
    keep_special_tokens: bool = False  # in texts, except at the end of a response
    thought_tags: ThoughtTags = dataclasses.field(default_factory=ThoughtTags)
    stop: StopStrings | None = None  # texts that end a turn
    keep_stop: bool = True  # texts include the stop string that ended them
    call_end: str = ""  # of the environment's tools: always kept in texts

    def roll_out(
        self,
        spec: RolloutSpec,
        weights: Params,
        requests: Requests,
        *,
        speculation: Speculation | None = None,
        clock: Stopwatch,
    ) -> RolloutResult:
        """Generate responses. Arguments: see `generate`.

        clock: records the seconds as time/rollout.
        """
        with clock.timed("time/rollout"):
            return generate(spec, weights, requests, speculation)

    def score(
        self, spec: RolloutSpec, prompts: Prompts, taken: CompletedGroups, clock: Stopwatch
    ) -> Responses:
        """Score the responses of the selected groups. prompts: those of the whole rollout."""
        with clock.timed("time/rollout"):
            prompts, result = taken.select(prompts)
            tokens, lens = hosts.fetch((result.rollout.tokens.ids, result.rollout.lens))
        with clock.timed("time/reward"):
            ended = spec.ended(tokens, lens)
            in_thought = np.repeat(self.begins_thoughts(prompts), spec.group_size)
            rows = [row[:n] for row, n in zip(tokens, lens)]
            readings = [self.read(*row) for row in zip(rows, ended, in_thought, strict=True)]
            texts, parts, ends = (list(column) for column in zip(*readings))
            problems = problems_of(prompts, range(len(lens)), len(lens))
            rewards = self.rewards(texts, *problems, parts, ends)
        return Responses(
            prompts,
            taken.groups,
            result.rollout,
            result.stats,
            tokens,
            lens,
            result.draft_lens,
            rewards,
            ended,
        )

    def respond(self, spec: RolloutSpec, weights: Params, requests: Requests) -> Responses:
        """Generate and score everything that is requested."""
        clock = Stopwatch()
        result = self.roll_out(spec, weights, requests, clock=clock)
        taken = CompletedGroups(np.arange(len(requests.prompts.lens)), result)
        return self.score(spec, requests.prompts, taken, clock)

    def read(self, ids: np.ndarray, ended: bool = True, in_thought: bool = False) -> Reading:
        """Read a response, or a turn of an episode: token ids int [n].

        ended: False if the length limit cut it. in_thought: the text before it opened a thought.
        """
        text = self.text(ids)
        return Reading(text, self.thought_tags.answer_part(text, in_thought), bool(ended))

    def text(self, ids: np.ndarray) -> str:
        """Decode a response as rewards see it; ids: int [n]."""
        ids = ids.tolist()
        if ids and ids[-1] in self.tokenizer.eos_ids:
            ids.pop()
        decode = functools.partial(self.tokenizer.decode, keep_special=self.keep_special_tokens)
        if self.stop is None:
            return decode(ids)
        return self.stop.cut(ids, decode, self.keep_stop, self.call_end)

    def begins_thoughts(self, prompts: Prompts) -> np.ndarray:
        """Mark which of the Q prompts leave a thought open, at the end or in what is continued."""
        return np.array([self._begins_thought(prompts, q) for q in range(len(prompts.lens))], bool)

    def _begins_thought(self, prompts: Prompts, q: int) -> bool:
        prompt = prompts.examples[q].prompt
        if not isinstance(prompt, str) and prompt[-1]["role"] == "assistant":
            return self.thought_tags.is_open(prompt[-1]["content"])
        return self.opens_thought(prompts.tokens[q, : prompts.lens[q]].tolist())

    def opens_thought(self, ids: Sequence[int]) -> bool:
        """Return whether token ids (of a prompt or a reply) leave a thought open at the end."""
        end = self.tokenizer.decode(ids[-MAX_TAG:], keep_special=True)
        return self.thought_tags.has_begun(end)

    def rewards(self, texts: Sequence, *problems: list) -> Rewards:
        """Return the pool's rewards; each process scores a part and all get all of them.

        A pool's error in one process is raised in all.
        """
        part = hosts.own_part(len(texts))
        own = functools.partial(self.pool.score, texts[part], *(x[part] for x in problems))
        return Rewards.joined(hosts.gather_results(own))

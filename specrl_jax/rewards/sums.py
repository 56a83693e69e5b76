"""Sums of weighted rewards, and rewards of a whole batch.

`make_pool` takes `reward.name`, a function or a sum like `math*0.8+format*0.2`, and returns what
scores batches. Each function of a sum has its own workers, so one cannot fail another. A function
with `batched = True` is called in this process, for a reward model or a judge: it is not contained
and has no time limit.
"""

import contextlib
from collections.abc import Callable, Sequence

import numpy as np

from specrl_jax.inputs import one_line, reward_terms
from specrl_jax.rewards.pool import RewardPool, Rewards, apply_threshold
from specrl_jax.rewards.scorers import (
    MAX_SCORE,
    find_scorer,
    is_batched,
    load_scorer,
    takes_ended,
)
from specrl_jax.types import FILLER_TASK


def make_pool(
    name: str, *, threshold: float, format: str = "", **limits
) -> "RewardPool | RewardSum":
    """Make the scorer for `reward.name`; a mistake raises a one-line error here.

    threshold: > 0: the reward is 1 if the score (the sum's, for a sum) reaches it, else 0.
    format: `reward.format`. limits: further arguments of `RewardPool`.
    """
    weights = reward_terms(name)
    functions = {term: load_scorer(term, format) for term in weights}
    batched = {term for term, function in functions.items() if is_batched(function)}
    whole = [term for term in weights if term in batched or find_scorer(term).reads_whole]
    if limits["extract"] and len(whole) == len(weights):
        raise ValueError(
            f'reward.extract must be "" where reward.name is {name}, which reads the whole response'
        )
    if weights == {name: 1.0} and not batched:
        return RewardPool(name, threshold=threshold, format=format, **limits)
    pools: dict[str, RewardPool | BatchScorer] = {}
    for term, function in functions.items():
        if term in batched:
            pools[term] = BatchScorer(term, function)
        else:
            pools[term] = RewardPool(term, format=format, **limits)
    return RewardSum(pools, weights, threshold)


class RewardSum(contextlib.AbstractContextManager):
    """Weighted sum of rewards, with the interface of `RewardPool`.

    An answer that one of the functions cannot score has reward 0.
    """

    def __init__(
        self,
        pools: "dict[str, RewardPool | BatchScorer]",
        weights: dict[str, float],
        threshold: float,
    ):
        self._pools = pools
        self._weights = weights
        self._threshold = threshold

    def __exit__(self, *_) -> None:
        self.close()

    def warm_up(self) -> None:
        for pool in self._pools.values():
            pool.warm_up()

    def close(self) -> None:
        for pool in self._pools.values():
            pool.close()

    def score(self, responses: Sequence[str], *problems: Sequence) -> Rewards:
        """Score B responses; problems: answers, tasks, metadatas and more, see `RewardPool`."""
        by_name = {name: pool.score(responses, *problems) for name, pool in self._pools.items()}
        total = np.zeros(len(responses))
        reasons = [""] * len(responses)
        for name, scores in by_name.items():
            total += self._weights[name] * scores.rewards.astype(np.float64)
            for row in np.flatnonzero(scores.failed):
                reasons[row] = reasons[row] or f"{scores.reasons[row]} (in {name})"
        rewards = apply_threshold(total.astype(np.float32), self._threshold)
        by_function = {name: scores.rewards for name, scores in by_name.items()}
        return Rewards.make_whole(rewards, reasons, by_function=by_function)


class BatchScorer:
    """A user's function that scores a whole batch, called in this process."""

    def __init__(self, name: str, function: Callable):
        self._name = name
        self._function = function

    def warm_up(self) -> None:
        """Do nothing: there is no worker."""

    def close(self) -> None:
        """Do nothing."""

    def score(self, responses, answers, tasks, metadatas, parts=None, ended=None) -> Rewards:
        """Score B responses; their answer parts are not read.

        Raises a one-line ValueError if the function does not return B numbers; nan marks an answer
        that could not be scored.
        """
        real = [i for i, task in enumerate(tasks) if task != FILLER_TASK]
        scores = np.zeros(len(responses))
        if real:
            given = {
                "responses": responses, "answers": answers, "tasks": tasks, "metadatas": metadatas,
            }  # fmt: skip
            if takes_ended(self._function):
                given["ended"] = [True] * len(responses) if ended is None else ended
            batch = {name: [values[i] for i in real] for name, values in given.items()}
            rule = f"return {len(real)} numbers for as many responses"
            with one_line(f"reward.name = {self._name} must {rule}"):
                own = [float(score) for score in self._function(**batch)]
                if len(own) != len(real):
                    raise ValueError(f"it returned {len(own)}")
                scores[real] = own
        wrong = f"the score must be within ±{MAX_SCORE:g}, got "
        reasons = ["" if abs(x) <= MAX_SCORE else f"{wrong}{x:g}" for x in scores]
        return Rewards.make_whole(scores, reasons)

"""Loads a scorer for the sandbox, whose workers find `prepare` by name.

Takes `reward.name`, `reward.extract` and `reward.format`; returns what the workers call. No JAX.
"""

import contextlib
import logging
import re
from collections.abc import Callable
from dataclasses import dataclass

from specrl_jax.inputs import answer_pattern
from specrl_jax.rewards.reading import extract as extract_answer
from specrl_jax.rewards.scorers import Scorer, checked, find_scorer, load_scorer, takes_ended
from specrl_jax.sandbox.worker_process import CONTAINED


@dataclass(frozen=True)
class LoadedScorer:
    """Scorer in the form that workers call: a `Loaded` of the sandbox."""

    known: Scorer
    scorer: Callable[..., float]
    pattern: re.Pattern | None  # of `reward.extract`
    wants_ended: bool
    contained: bool  # False: the user's function has `contained = False`
    # Tasks whose answers need their own process, as their text may be executed; None: all.
    alone: frozenset[str] | None
    starts_program: bool
    hint: str

    def call(
        self, response: str | None, answer: str, task: str, metadata: dict, ended: bool = True
    ) -> float:
        """Return the score of a response to a problem; ended: whether it finished."""
        response = extract_answer(self.pattern, response)
        if response is None:
            return 0.0
        problem = {"answer": answer, "task": task, "metadata": metadata}
        if self.wants_ended:
            problem["ended"] = ended
        return self.check(self.scorer(response=response, **problem))

    def check(self, value) -> float:
        """Return a score; raise if it is not one."""
        return checked(float(value))

    def may_share(self, response, answer, task: str, *_) -> bool:
        """Return whether an answer of a task may be scored in the same process as others."""
        return self.alone is not None and task not in self.alone


def load(name: str, extract: str, format: str) -> LoadedScorer:
    """Load the scorer; raise a one-line ValueError if that fails."""
    known = find_scorer(name)
    scorer = load_scorer(name, format)
    contained = bool(getattr(scorer, "contained", True))
    alone = known.executes if contained else frozenset()
    return LoadedScorer(
        known,
        scorer,
        pattern=answer_pattern("" if known.reads_whole else extract, "reward.extract"),
        wants_ended=takes_ended(scorer),
        contained=contained,
        alone=alone,
        starts_program=known.starts_program,
        hint=CONTAINED if alone is None else "",
    )


def prepare(name: str, extract: str, format: str) -> LoadedScorer:
    """Load the scorer in a worker, with the imports and compiled patterns of its first call.

    What executes answers and the user's function are not called.
    """
    logging.getLogger("math_verify").setLevel(logging.CRITICAL)  # avoids a line per odd answer
    loaded = load(name, extract, format)
    if loaded.known.score and loaded.alone is not None:
        with contextlib.suppress(Exception):
            loaded.known.score(r"so \boxed{\frac{1}{2}}", "2", "chain_sum", {})
    return loaded

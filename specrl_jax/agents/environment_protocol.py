"""Protocol of an environment: a plain class that answers an episode's responses by `Step`s.

One object is made for an episode. It lives in a process of the workers (`environment_process`),
within limits of time and memory, until the episode is over. No JAX.
"""

from collections.abc import Iterable
from typing import NamedTuple, Protocol

MAX_OBSERVATION = 16_000  # characters; a longer observation is cut
ROLES = ("user", "tool")  # of those who speak to the policy


class Step(NamedTuple):
    """Answer of an environment to a response."""

    observation: str = ""  # for the policy to read, unless done
    reward: float = 0.0  # of this turn: an episode's reward is the sum of its turns'
    done: bool = False  # the episode is over
    role: str = "user"  # one of `ROLES`, under which a chat template writes the observation


class StepResult(NamedTuple):
    """Step of an environment as its pool gives it, or why there is none."""

    reward: float = 0.0  # 0 where failed
    done: bool = True
    observation: str = ""
    failure: str = ""  # why there is no step, in one printable line
    role: str = "user"


class Environment(Protocol):
    """One episode. Its first prompt is the problem's.

    A class may say `replayable = True`: the same responses get the same answers, and soon. An
    episode whose process ends unexpectedly is then played again. It may say `contained = False`:
    the class is trusted, and keeps the network and the files of its user. `starts_program = True`:
    it runs what a response says in a program of its own. A `prepare()` is called once, before the
    processes of episodes are forked, to import what all of them need. `reads_whole = True`: steps
    get all of a response, its thoughts too. `call_end = ".."`: the text that ends a call of a tool.
    Steps get it where it has stopped a turn, and a turn that holds it is no answer to extract.

    `after_timeout = Step(..)` says that an episode may go on after a step that took too long: with
    a new object, which `reset` starts, and whose files are gone. The step's observation tells the
    policy so. An episode of a replayable class goes on from before the turn, and needs no such
    step.

    An episode that `environment.max_turns` or the length ends may be worth something so far: a
    method `score()` is then called once, after the last step or before any, and returns a reward
    beyond those of the steps. `pays_at_end = True` without it says that such an episode gets
    nothing.
    """

    def reset(self, answer: str, task: str, metadata: dict) -> None:
        """Begin the episode of a problem."""

    def step(self, response: str) -> Step:
        """Answer the policy's next response; an exception ends the episode, the turn's reward is 0.

        response: what follows its thoughts, "" where a thought is not closed; never one that the
          length cut.
        """


def take_step(environment: Environment, response: str) -> Step:
    """Return the environment's answer; an exception where it is no `Step`."""
    return check_step(environment.step(response))


def check_step(values: Iterable) -> Step:
    """Return the `Step` of its values; an exception where they make none."""
    step = Step(*values)
    if not isinstance(step.observation, str):
        kind = type(step.observation).__name__
        raise TypeError(f"the observation of a step must be text, got {kind}")
    if step.role not in ROLES:
        raise ValueError(f"the role of a step must be {' or '.join(ROLES)}, got {step.role!r}")
    observation = step.observation[:MAX_OBSERVATION]
    return Step(observation, float(step.reward), bool(step.done), step.role)

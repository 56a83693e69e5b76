"""Protocol of an environment: a plain class that replies to an episode's responses with `Step`s.

One object is made per episode. It lives in a worker process (`environment_process`), with limits on
time and memory, until the episode is over. No JAX.
"""

from collections.abc import Iterable
from typing import NamedTuple, Protocol

MAX_OBSERVATION = 16_000  # characters; a longer observation is cut
ROLES = ("user", "tool")  # of whoever speaks to the policy


class Step(NamedTuple):
    """Reply of an environment to a response."""

    observation: str = ""  # for the policy to read, unless done
    reward: float = 0.0  # of this turn: an episode's reward is the sum of its turns'
    done: bool = False  # the episode is over
    role: str = "user"  # one of `ROLES`, used by a chat template to write the observation


class StepResult(NamedTuple):
    """Step of an environment as returned by its pool, or why there is none."""

    reward: float = 0.0  # 0 if failed
    done: bool = True
    observation: str = ""
    failure: str = ""  # why there is no step, in one printable line
    role: str = "user"


class Environment(Protocol):
    """One episode. Its first prompt is the problem's.

    A class may set `replayable = True`: the same responses get the same replies, and quickly. An
    episode whose process ends unexpectedly is then replayed. It may set `contained = False`: the
    class is trusted, and keeps its user's network and files. `starts_program = True`: it runs
    what a response contains in a separate program. `prepare()` is called once, before the processes
    of episodes are forked, to import what all of them need. `reads_whole = True`: steps get the
    whole response, including thoughts. `call_end = ".."`: the text that ends a tool call. Steps get
    it if it stopped a turn, and a turn that contains it is not an answer to extract.

    `after_timeout = Step(..)` means that an episode may continue after a step that took too long:
    with a new object, started by `reset`, whose files are gone. The step's observation tells the
    policy so. An episode of a replayable class resumes before the turn, and needs no such step.

    An episode cut by `environment.max_turns` or the length limit may have earned something: a
    method `score()` is then called once, after the last step or before any, and returns a reward on
    top of those of the steps. `pays_at_end = True` without it means that such an episode gets
    nothing.
    """

    def reset(self, answer: str, task: str, metadata: dict) -> None:
        """Start the episode of a problem."""

    def step(self, response: str) -> Step:
        """Reply to the policy's next response; an exception ends the episode with turn reward 0.

        response: what follows its thoughts, "" if a thought is not closed; never one that the
          length limit cut.
        """


def take_step(environment: Environment, response: str) -> Step:
    """Return the environment's reply; raise if it is not a `Step`."""
    return check_step(environment.step(response))


def check_step(values: Iterable) -> Step:
    """Return the `Step` with these values; raise if they do not form one."""
    step = Step(*values)
    if not isinstance(step.observation, str):
        kind = type(step.observation).__name__
        raise TypeError(f"the observation of a step must be text, got {kind}")
    if step.role not in ROLES:
        raise ValueError(f"the role of a step must be {' or '.join(ROLES)}, got {step.role!r}")
    observation = step.observation[:MAX_OBSERVATION]
    return Step(observation, float(step.reward), bool(step.done), step.role)

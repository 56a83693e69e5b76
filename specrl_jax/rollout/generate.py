"""One rollout: requests in, responses with their log-probs out.

`generate` starts all rows, runs the scheduler until they finish, and reads the result.
"""

import dataclasses

import numpy as np

from specrl_jax import hosts
from specrl_jax.models.transformer import Params
from specrl_jax.rollout.engine.all_rows import read_rollout
from specrl_jax.rollout.engine.runner import Runner, Stats
from specrl_jax.rollout.engine.scheduler import Scheduler
from specrl_jax.rollout.engine.speculation import Speculation
from specrl_jax.rollout.requests import Requests
from specrl_jax.rollout.spec import RolloutSpec
from specrl_jax.types import Rollout


@dataclasses.dataclass(frozen=True)
class RolloutResult:
    """B rows at the end of a rollout."""

    rollout: Rollout
    finished: np.ndarray  # bool [B], rows that are complete
    draft_lens: np.ndarray  # int32 [B], tokens of each row's draft
    stats: Stats


def generate(
    spec: RolloutSpec,
    weights: Params,
    requests: Requests,
    speculation: Speculation | None = None,
) -> RolloutResult:
    """Roll out G responses to each of Q prompts, in consecutive rows.

    speculation: chooses the width of decode steps; None: always the widest.
    """
    runner = Runner(spec, weights, requests)
    all_rows = Scheduler(runner, speculation).run()
    step = np.int32(requests.noise.step)
    rollout = read_rollout(spec, all_rows, requests.drafts, requests.held, step)
    return RolloutResult(rollout, hosts.fetch(all_rows.done), runner.drafted_lens, runner.stats)

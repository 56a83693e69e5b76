from typing import NamedTuple

import jax
import pytest
import rollout_reference as ref
from scheduler_cases import PROMPTS, make_spec, run_rollout

from specrl_jax.types import Drafts, Rollout


class Rollouts(NamedTuple):
    """Rollouts of one policy, and drafts; on the host."""

    plain: Rollout  # up to MAX_LENS
    endless: Rollout  # up to R
    old: Drafts  # a complete rollout of an earlier policy


@pytest.fixture(scope="module")
def rollouts(make_mesh):
    with jax.set_mesh(make_mesh(1, 1, 1)):
        spec = make_spec(**ref.ONE_BUCKET)
        plain, _ = run_rollout(spec)
        endless, _ = run_rollout(spec, max_lens=None)
        old, _ = ref.run(spec, ref.policy(0.1, ref.ONE_LAYER)[1], PROMPTS)
        yield Rollouts(ref.host(plain), ref.host(endless), ref.host(ref.as_drafts(old)))

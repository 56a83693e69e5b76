"""The reward worker as it runs on systems that offer nothing."""

import weak_worker

from specrl_jax.rewards import containment

load = weak_worker.load


def serve(*arguments):
    containment._landlock_abi = lambda: 0
    containment._has_seccomp = lambda: False
    weak_worker.serve(*arguments)

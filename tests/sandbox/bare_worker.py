"""The reward worker as it runs on systems that offer nothing."""

import weak_worker

from specrl_jax.sandbox import linux


def serve(*arguments):
    linux.landlock_abi = lambda: 0
    linux.has_seccomp = lambda: False
    weak_worker.serve(*arguments)

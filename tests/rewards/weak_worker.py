"""The reward worker as it runs on systems without user namespaces."""

from specrl_jax.rewards import containment, worker_process

load = worker_process.load


def serve(*arguments):
    containment._unshare = lambda: 1 / 0
    worker_process.serve(*arguments)

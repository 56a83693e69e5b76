"""The reward worker as it runs on systems without user namespaces."""

from specrl_jax.sandbox import linux, worker_process


def serve(*arguments):
    linux.unshare = lambda: 1 / 0
    worker_process.serve(*arguments)

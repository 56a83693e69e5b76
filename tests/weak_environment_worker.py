"""Worker of environments as it runs on systems without user namespaces."""

from specrl_jax.agents import environment_process
from specrl_jax.sandbox import linux

load = environment_process.load
prepare = environment_process.prepare


def serve(*arguments):
    linux.unshare = lambda: 1 / 0
    linux.own_pids = lambda: False
    environment_process.serve(*arguments)

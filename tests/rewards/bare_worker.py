"""The reward worker as it runs on systems that offer nothing."""

from specrl_jax.rewards import containment
from specrl_jax.rewards.worker_process import load, serve

__all__ = ["load", "serve"]

containment._unshare = lambda: 1 / 0
containment._landlock_abi = lambda: 0
containment._has_seccomp = lambda: False

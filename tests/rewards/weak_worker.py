"""The reward worker as it runs on systems that offer less."""

from specrl_jax.rewards import containment
from specrl_jax.rewards.worker_process import load, serve

__all__ = ["load", "serve"]

containment._unshare = lambda: 1 / 0

"""Reinforcement learning with speculative rollouts in JAX."""

__version__ = "0.1.0"

"""Reinforcement learning with speculative rollouts in JAX."""

__version__ = "0.1.0"

import os

# On import transformers advises to install PyTorch, which only its models need.
os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")

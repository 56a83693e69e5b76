"""Reinforcement learning with speculative rollouts in JAX."""

__version__ = "0.1.0"

import os
import warnings

# On import transformers advises to install PyTorch, which only its models need.
os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
# On import JAX warns of a plugin of another version, also where there is no device for it. Where
# there is one, `runtime.all_devices` says what to do.
warnings.filterwarnings("ignore", "JAX plugin .* is not compatible", RuntimeWarning)

"""Reinforcement learning with speculative rollouts in JAX."""

__version__ = "0.1.0"

import os
import warnings

# On import transformers advises installing PyTorch, which only its models need.
os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
# On import JAX warns about a plugin of another version, even without a device for it. If there is
# one, `runtime.all_devices` reports what to do.
warnings.filterwarnings("ignore", "JAX plugin .* is not compatible", RuntimeWarning)

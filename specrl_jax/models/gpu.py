"""Pallas's Triton backend, and the GPUs that it compiles for: used by all our kernels."""

import jax

try:  # jax 0.11 and later announce its removal
    from jax.experimental.pallas import triton
except ImportError:
    triton = None

_LEAST_CAPABILITY = 8.0  # Ampere


def refusal() -> str:
    """Return why no kernel can run on the mesh's GPUs, present or not, or ""."""
    device = jax.sharding.get_mesh().devices.flat[0]
    capability = float(getattr(device, "compute_capability", _LEAST_CAPABILITY))
    if capability < _LEAST_CAPABILITY:
        return f"kernels need compute capability {_LEAST_CAPABILITY:g}, this GPU has {capability:g}"
    if triton is None:
        return f"jax {jax.__version__} has no Triton backend of Pallas"
    return ""

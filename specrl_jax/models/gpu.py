"""Pallas's Triton backend, and which GPUs it compiles for: for all kernels of ours."""

import jax

try:  # jax 0.11 and later say that it will be removed
    from jax.experimental.pallas import triton
except ImportError:
    triton = None

_LEAST_CAPABILITY = 8.0  # Ampere


def refusal() -> str:
    """Return why no kernel can be taken on the mesh's GPUs, present or absent, or ""."""
    device = jax.sharding.get_mesh().devices.flat[0]
    capability = float(getattr(device, "compute_capability", _LEAST_CAPABILITY))
    if capability < _LEAST_CAPABILITY:
        return f"kernels need compute capability {_LEAST_CAPABILITY:g}, this GPU has {capability:g}"
    if triton is None:
        return f"jax {jax.__version__} has no Triton backend of Pallas"
    return ""

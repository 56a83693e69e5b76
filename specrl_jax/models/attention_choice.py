"""Which kernels of `attention` a run takes: by rule, and by a measurement where the device is here.

`choose` gives `ModelConfig.kernels`. With model.attention = auto a kernel is run once beside the
reference, on arrays of the run's shapes. It is taken where it agrees with the reference and is
faster. Where the device is absent, as for `launch/compile.py`, rules alone decide.
"""

import dataclasses
import functools
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from specrl_jax import hosts
from specrl_jax.inputs import reason
from specrl_jax.models import attention
from specrl_jax.models.config import ModelConfig
from specrl_jax.models.kv_cache import as_layer, init_cache
from specrl_jax.sharding import platform, shards, spec

_ROWS = 16  # at most, on each shard of the batch, to compare with
_TIMES = 5
_BY_RULE = "its rules hold, not measured"
# A kernel agrees where outputs and gradients differ by at most this share of their largest value.
_TOLERANCE = {"float32": 1e-2, "bfloat16": 5e-2}  # TPUs multiply float32 in bfloat16 passes


@dataclasses.dataclass(frozen=True)
class Shapes:
    """Of a run's attention, over all devices."""

    rows: int  # that decode together
    slots: int  # of the longest cache
    verify_width: int  # tokens of a row in a verification pass
    packed_tokens: int  # of a packed sequence

    @classmethod
    def of(cls, config: Any) -> "Shapes":
        """Of a run's config."""
        rollout, prompt = config.rollout, config.data.prompt_len
        rows = rollout.prompts_per_step * rollout.group_size
        return cls(
            rows=min(rows, rollout.max_rows or rows),
            slots=prompt + max(rollout.response_len, rollout.max_width),
            verify_width=min(rollout.verify_width or rollout.response_len, rollout.response_len),
            packed_tokens=2 * (prompt + rollout.response_len),
        )


def choose(setting: str, model: ModelConfig, shapes: Shapes) -> tuple[str, ...]:
    """Those of `attention.USES` for which a kernel is taken. Prints a line for each, but where the
    platform has none.

    setting: model.attention. Raises ValueError in one line where it is "kernel" and one cannot be
    taken.
    """
    kernels = attention.kernel_module(platform())
    if setting == "reference":
        return ()
    if kernels is None:
        if setting == "kernel":
            raise ValueError(
                f"model.attention must be auto or reference on {platform()}, which has no kernels, "
                "got 'kernel'"
            )
        return ()
    chosen, absent = [], _absent()
    for use in attention.USES:
        why_not = kernels.refusal(use, model, shapes.slots)
        if not why_not and absent and use not in kernels.AHEAD_OF_TIME:
            why_not = "the kernel can only be compiled where the device is"
        if setting == "kernel" and why_not:
            raise ValueError(
                f"model.attention must be auto or reference for this model, got 'kernel': for "
                f"{use}, {why_not}"
            )
        taken, why = not why_not, why_not or "model.attention = kernel"
        if taken and setting == "auto":
            so_far = model.replace(kernels=tuple(chosen))  # they set the cache's layout
            taken, why = (True, _BY_RULE) if absent else _measured(use, so_far, shapes)
        print(f"attention, {use}: {'kernel' if taken else 'reference'} ({why})", flush=True)
        chosen += [use] if taken else []
    return tuple(chosen)


def _absent() -> bool:
    """Whether programs are compiled for devices that are not here."""
    return jax.sharding.get_mesh().devices.flat[0] not in jax.devices()


def _measured(use: str, model: ModelConfig, shapes: Shapes) -> tuple[bool, str]:
    """Whether the kernel is taken beside those of `model`, and why; the primary's clock decides."""
    results, problem = [], ""
    try:
        for kernels in (model.kernels, (*model.kernels, use)):
            results.append(_timed(*_program(use, model.replace(kernels=kernels), shapes)))
    except Exception as error:  # compilers and kernels have kinds of their own
        problem = f"the kernel fails: {reason(error)}"
    if problems := list(filter(None, hosts.gather(problem))):
        return False, problems[0]  # in all processes, also those where it works
    (want, slow), (got, fast) = results
    difference = max(map(_difference, jax.tree.leaves(got), jax.tree.leaves(want)))
    return hosts.broadcast(judge(difference, _TOLERANCE[model.dtype], fast, slow))


def judge(error: float, tolerance: float, fast: float, slow: float) -> tuple[bool, str]:
    """Whether a kernel that differs by `error` is taken, and why. fast, slow: seconds of the kernel
    and of the reference."""
    seconds = f"{fast * 1e3:.3g} ms, the reference {slow * 1e3:.3g} ms"
    if not error <= tolerance:  # NaN, too
        return False, f"the kernel differs by {error:.2g} of the largest value, over {tolerance:g}"
    if fast >= slow:
        return False, f"the kernel takes {seconds}"
    return True, f"{seconds}, differs by {error:.2g} of the largest value"


def _program(use: str, model: ModelConfig, shapes: Shapes) -> tuple[Callable, tuple]:
    """A jitted function of attention alone and its arguments, equal for kernel and reference."""
    rows = min(-(-shapes.rows // shards("batch")), _ROWS) * shards("batch")
    random = functools.partial(_random, jnp.dtype(model.dtype), heads=model.num_heads)
    size = model.head_dim
    if use == "packed":
        tokens = shapes.packed_tokens
        q = random(0, shards("batch"), tokens, size=size) * size**-0.5
        k, v = (random(i, *q.shape[:2], heads=model.num_kv_heads, size=size) for i in (1, 2))
        return jax.jit(functools.partial(_packed, model.kernels)), (q, k, v, _ends(q))
    width = 1 if use == "decode" else shapes.verify_width
    q = random(0, rows, width, size=size) * size**-0.5
    both = (random(i, rows, shapes.slots, heads=model.num_kv_heads, size=size) for i in (1, 2))
    layer = jax.jit(functools.partial(_filled, model))(*both)
    starts = jnp.arange(rows, dtype=jnp.int32) * (shapes.slots - width) // max(rows - 1, 1)
    starts = jax.sharding.reshard(starts, spec("batch"))
    attend = functools.partial(attention.attend, kv_heads=model.num_kv_heads, kernels=model.kernels)
    return jax.jit(attend), (q, layer, starts)


def _packed(kernels: tuple[str, ...], q: Array, k: Array, v: Array, ends: Array):
    """Gradients and output of a packed sequence's attention, and the output of a prefill."""

    def loss(q, k, v):
        out = attention.attend_packed(q, k, v, ends, kernels=kernels)
        prefilled = attention.attend_packed(q, k, v, kernels=kernels)
        return jnp.sum(out.astype(jnp.float32) ** 2), (out, prefilled)

    return jax.grad(loss, argnums=(0, 1, 2), has_aux=True)(q, k, v)


def _filled(model: ModelConfig, keys: Array, values: Array):
    (like,) = init_cache(model.replace(num_layers=1), keys.shape[0], 1)
    return as_layer(keys, values, like)


def _ends(q_BTNH: Array) -> Array:
    """Of tries whose first half is shared by four branches."""
    rows, tokens = q_BTNH.shape[:2]
    slots = jnp.arange(tokens, dtype=jnp.int32)
    shared, branch = tokens // 2, max(tokens // 8, 1)
    ends = jnp.where(slots < shared, tokens, (slots // branch + 1) * branch)
    ends = jnp.broadcast_to(jnp.minimum(ends, tokens), (rows, tokens))
    return jax.sharding.reshard(ends, spec("batch", None))


def _random(dtype: Any, seed: int, rows: int, tokens: int, *, heads: int, size: int) -> Array:
    shape, layout = (rows, tokens, heads, size), spec("batch", None, "heads", None)
    draw = functools.partial(jax.random.normal, shape=shape, out_sharding=layout)
    return jax.jit(lambda key: draw(key).astype(dtype))(jax.random.key(seed))


def _timed(function: Callable, arguments: tuple) -> tuple[Any, float]:
    """The result, and the fewest seconds of some runs."""
    result, seconds = jax.block_until_ready(function(*arguments)), []
    for _ in range(_TIMES):
        start = time.perf_counter()
        jax.block_until_ready(function(*arguments))
        seconds.append(time.perf_counter() - start)
    return result, min(seconds)


@jax.jit
def _relative(got: Array, want: Array) -> Array:
    got, want = got.astype(jnp.float32), want.astype(jnp.float32)
    return jnp.max(jnp.abs(got - want)) / jnp.max(jnp.abs(want))


def _difference(got: Array, want: Array) -> float:
    return float(_relative(got, want))

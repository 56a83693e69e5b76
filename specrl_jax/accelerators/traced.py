"""Reads a traced program, before any compiler: its arithmetic, and an estimate of its memory.

FLOPs are those of matrix products over all devices, as the program is written. Loops of unknown
length count once and apart, as in `compiled.Cost`. Attention kernels count by `_KERNELS`.

Memory assumes what XLA usually does: elementwise operations are fused into their consumers, updates
of slices and the state of loops are in place. Collectives' buffers and fragmentation are left out.
"""

import collections
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

from jax.extend.core import ClosedJaxpr, Jaxpr, Literal

# Operations without an array of their own: the consumer computes them, or they are only views.
_FUSED = {
    "abs", "add", "and", "broadcast_in_dim", "ceil", "clamp", "convert_element_type", "copy",
    "copy_p", "cos", "cumsum", "div", "eq", "erf", "exp", "exp2", "expand_dims", "expm1", "floor",
    "ge", "gt", "integer_pow", "iota", "is_finite", "le", "log", "log1p", "logistic", "lt", "max",
    "min", "mul", "ne", "neg", "not", "optimization_barrier", "or", "pow", "pvary", "random_bits",
    "random_wrap", "rem", "reshape", "rev", "round", "rsqrt", "select_n", "shift_left",
    "shift_right_arithmetic", "shift_right_logical", "sign", "sin", "slice", "sqrt", "square",
    "squeeze", "stop_gradient", "sub", "tanh", "transpose", "xor",
}  # fmt: skip
_REDUCTIONS = {"reduce_sum", "reduce_max", "reduce_min", "reduce_and", "reduce_or", "argmax"}
_IN_PLACE = {"dynamic_update_slice", "scatter", "scatter-add"}


# Attention kernels by the start of their names → products of queries and keys, and the share of all
# pairs that is computed: a causal mask's, or None for the live share of the cache.
_KERNELS: dict[str, tuple[int, float | None]] = {
    "ragged_paged_attention": (2, None),
    "mha_forward": (2, None),
    "splash_mha_fwd": (2, 0.5),
    "splash_mha_dq": (3, 0.5),
    "splash_mha_dkv": (4, 0.5),
}


class Flops(NamedTuple):
    """Operations of matrix products, over all devices; two a multiplication."""

    once: float = 0.0
    each: float = 0.0  # of one pass of the loops of unknown length

    def plus(self, other: "Flops", times: float = 1) -> "Flops":
        return Flops(self.once + times * other.once, self.each + times * other.each)


def count_flops(
    jaxpr: Jaxpr | ClosedJaxpr, live: float = 1.0, *, kernels_only: bool = False
) -> Flops:
    """Count all that a program computes, or its attention kernels. live: share of the cache's slots
    that hold tokens, which is what kernels read of it."""
    total = Flops()
    for eqn in _open(jaxpr).eqns:
        name = eqn.primitive.name
        inner = [count_flops(x, live, kernels_only=kernels_only) for x in _inside(eqn)]
        if name == "dot_general" and not kernels_only:
            contracted = eqn.params["dimension_numbers"][0][0]
            sizes = (eqn.invars[0].aval.shape[axis] for axis in contracted)
            total = total.plus(Flops(2 * math.prod((*eqn.outvars[0].aval.shape, *sizes))))
        elif name == "pallas_call":
            total = total.plus(Flops(_kernel_flops(eqn, live)))
        elif name == "cond":
            total = total.plus(max(inner))
        elif name == "while":
            total = total.plus(Flops(0, sum(x.once + x.each for x in inner)))
        else:
            times = eqn.params["length"] if name == "scan" else 1
            if name == "shard_map":  # shapes inside are those of one device
                times = math.prod(eqn.params["mesh"].shape.values())
            for flops in inner:
                total = total.plus(flops, times)
    return total


def _kernel_flops(eqn: Any, live: float) -> float:
    """Count an attention kernel: its first two arrays of numbers are queries and keys."""
    name = eqn.params["name"]
    kind = next((kind for kind in _KERNELS if name.startswith(kind)), None)
    if kind is None:
        raise ValueError(f"traced._KERNELS must say what {name} computes")
    products, share = _KERNELS[kind]
    arrays = [x.aval for x in eqn.invars if x.aval.dtype.kind not in "iub" and x.aval.ndim > 1]
    queries, keys = arrays[:2]
    if kind == "ragged_paged_attention":  # pages of all rows, keys and values; lengths [rows]
        rows = next(x.aval.shape[0] for x in eqn.invars if x.aval.ndim == 1)
        slots = keys.shape[0] * keys.shape[1] / rows
    elif kind == "mha_forward":  # a key/value head's queries are an axis
        slots = keys.size * queries.shape[-2] / queries.size
    else:
        slots = keys.shape[-2]
    return 2 * products * queries.size * slots * (live if share is None else share)


def temporary_bytes(jaxpr: Jaxpr | ClosedJaxpr, donated: tuple = ()) -> int:
    """Bytes that a device needs beside the program's arguments, its results included but for those
    that take the place of `donated` arguments, given as avals."""
    jaxpr = _open(jaxpr)
    buffers = _Buffers(jaxpr, donated)
    live = peak = 0
    for place, eqn in enumerate(jaxpr.eqns):
        live += buffers.made.get(place, 0)
        results = sum(_bytes(x.aval) for x in eqn.outvars)
        inner = max((temporary_bytes(x) for x in _inside(eqn)), default=0)
        if eqn.primitive.name not in ("scan", "while"):  # whose results are not made in one pass
            inner = max(inner - results, 0)
        peak = max(peak, live + inner)
        live -= buffers.freed.get(place, 0)
    return peak


class _Buffers:
    """Times at which arrays are made and freed, as {place of the equation: bytes}."""

    def __init__(self, jaxpr: Jaxpr, donated: tuple):
        self.made: dict[int, int] = {}
        self.freed: dict[int, int] = {}
        self._sizes: dict[Any, int] = {}  # of the arrays in memory that are not arguments
        self._used: dict[Any, int] = {}  # the last place that reads one
        self._results = {x for x in jaxpr.outvars if not isinstance(x, Literal)}
        self._donated = collections.Counter((x.shape, x.dtype) for x in donated)
        # What a value is computed from: arrays in memory, itself if it is one.
        arguments = jaxpr.invars + jaxpr.constvars
        self._from: dict[Any, frozenset] = {x: frozenset([x]) for x in arguments}
        for place, eqn in enumerate(jaxpr.eqns):
            self._take(place, eqn)
        for var in jaxpr.outvars:
            if not isinstance(var, Literal):
                self._read(len(jaxpr.eqns), var, whole=True)
        for var, size in self._sizes.items():
            self.freed[self._used[var]] = self.freed.get(self._used[var], 0) + size

    def _take(self, place: int, eqn: Any) -> None:
        name = eqn.primitive.name
        sources = [x for x in eqn.invars if not isinstance(x, Literal)]
        view = name == "reshard" and _bytes(eqn.invars[0].aval) == _bytes(eqn.outvars[0].aval)
        if name in _FUSED or view:
            union = frozenset().union(*(self._from[x] for x in sources))
            self._from |= dict.fromkeys(eqn.outvars, union)
            return
        for var in sources:
            self._read(place, var, whole=name not in _REDUCTIONS)
        kept = _state_of(eqn)
        for number, var in enumerate(eqn.outvars):
            old = kept.get(number)
            if old is None or isinstance(old, Literal):
                self._make(place, var)
            elif name in _IN_PLACE or not self._from[old].isdisjoint(self._sizes):
                self._from[var] = self._from[old] | {var}  # in the place of the old one
            else:  # the state of a loop begins as a copy of an argument
                self._make(place, var)

    def _read(self, place: int, var: Any, *, whole: bool) -> None:
        """Note a read. whole: a value that is only computed from others has to be in memory."""
        for array in self._from[var]:
            self._used[array] = place
        if whole and var not in self._from[var]:
            self._make(place, var)

    def _make(self, place: int, var: Any) -> None:
        aval = var.aval
        size = _bytes(var.aval)
        kind = getattr(aval, "shape", ()), getattr(aval, "dtype", None)
        if var in self._results and self._donated[kind]:
            self._donated[kind] -= 1
            size = 0
        self.made[place] = self.made.get(place, 0) + size
        self._sizes[var] = size
        self._used[var] = place
        self._from[var] = frozenset([var])


def _state_of(eqn: Any) -> dict[int, Any]:
    """Results that take the place of an operand: by number of the result."""
    params = eqn.params
    name = eqn.primitive.name
    if name in _IN_PLACE:
        return {0: eqn.invars[0]}
    if name == "scan":
        # Operands are constants, state and slices; the body sees slices with an axis less.
        body = _open(params["jaxpr"])
        slices = sum(x.aval.ndim > y.aval.ndim for x, y in zip(eqn.invars, body.invars))
        state = sum(x.aval.ndim == y.aval.ndim for x, y in zip(eqn.outvars, body.outvars))
        first = len(eqn.invars) - slices - state
        return dict(enumerate(eqn.invars[first : first + state]))
    if name == "while":
        first = params["cond_nconsts"] + params["body_nconsts"]
        return dict(enumerate(eqn.invars[first:]))
    return {}


def _bytes(aval: Any) -> int:
    """Return the bytes of an array on one device."""
    shape = getattr(aval, "shape", ())
    if not hasattr(aval, "dtype") or not hasattr(aval.dtype, "itemsize"):
        return 0
    pieces = 1
    sharding = getattr(aval, "sharding", None)
    for axes in getattr(sharding, "spec", ()):
        for axis in axes if isinstance(axes, tuple) else (axes,):
            pieces *= sharding.mesh.shape[axis] if isinstance(axis, str) else 1
    return -(-math.prod(shape) * aval.dtype.itemsize // pieces)


def _inside(eqn: Any) -> Iterator[Jaxpr | ClosedJaxpr]:
    """The jaxprs of an equation; those of a kernel describe a part of it, and are left out."""
    if eqn.primitive.name == "pallas_call":
        return
    for value in eqn.params.values():
        for x in value if isinstance(value, tuple | list) else (value,):
            if isinstance(x, Jaxpr | ClosedJaxpr):
                yield x


def _open(jaxpr: Jaxpr | ClosedJaxpr) -> Jaxpr:
    return jaxpr.jaxpr if isinstance(jaxpr, ClosedJaxpr) else jaxpr

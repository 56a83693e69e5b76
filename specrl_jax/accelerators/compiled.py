"""Reads an optimized HLO module: collectives by mesh axis, loops, and bytes through memory.

A loop whose number of passes the compiler knows counts that often. The others, such as the loop
over tokens or over micro-batches, count once and apart: `Cost.each` is one pass of all of them. Of
a conditional the branch that moves most bytes counts. Sizes are those of one device.

The compiler knows nothing of attention kernels. Those over the cache read the live part of it,
others their operands once; all write their results.
"""

import collections
import dataclasses
import math
import re
from collections.abc import Iterator, Mapping

import numpy as np

_BYTES = {
    "pred": 1, "s8": 1, "u8": 1, "f8e4m3fn": 1, "f8e5m2": 1, "s16": 2, "u16": 2, "f16": 2,
    "bf16": 2, "s32": 4, "u32": 4, "f32": 4, "s64": 8, "u64": 8, "f64": 8, "c64": 8,
}  # fmt: skip
_ARRAY = re.compile(rf"\b({'|'.join(_BYTES)})\[([\d,]*)\](\{{[^}}]*\}})?")
_INSTRUCTION = re.compile(r"\s+(ROOT )?%?([\w.\-]+) = (.*)$")
_COMPUTATION = re.compile(r"(ENTRY )?%?([\w.\-]+) \(.*->.*\{\s*$")
_COLLECTIVES = (
    "all-gather", "all-reduce", "reduce-scatter", "all-to-all", "collective-permute",
    "ragged-all-to-all", "collective-broadcast",
)  # fmt: skip
_COLLECTIVE = re.compile(rf"({'|'.join(_COLLECTIVES)})(-start)?$")
# Operations that move nothing through memory.
_FREE = {
    "parameter", "tuple", "get-tuple-element", "bitcast", "constant", "after-all", "partition-id",
    "replica-id", "while", "conditional", "call", "opt-barrier", "async-start", "async-done",
    "async-update", "copy-done", "all-gather-done", "all-reduce-done", "collective-permute-done",
}  # fmt: skip
_SLICES = ("dynamic-slice", "slice", "gather")
# In place: only the operand at this place is read, and written.
_UPDATES = {"dynamic-update-slice": 1, "scatter": -1}
_WORKSPACE = re.compile(r", s8\[\d+\](\{[^}]*\})?\)$")  # of cuBLAS, in the result's type
# Custom calls that read the largest operand, the cache, or all of that size, as far as it is live.
_OVER_CACHE = re.compile(r"ragged_paged_attention|mha_forward")
_KERNEL = re.compile(r'custom_call_target="(tpu_custom_call|__gpu\$xla.gpu.triton)"')
_IMPLAUSIBLE = 10**12  # cycles; the compiler's estimate overflowed


@dataclasses.dataclass(frozen=True)
class Instruction:
    name: str
    type: str
    kind: str
    operands: tuple[str, ...]
    rest: str  # attributes, metadata
    root: bool

    def called(self, *attributes: str) -> list[str]:
        """The computations under the first of these attributes that is there."""
        for attribute in attributes:
            if match := re.search(rf"\b{attribute}=(\{{[^}}]*\}}|%?[\w.\-]+)", self.rest):
                return re.findall(r"[\w.\-]+", match[1])
        return []

    def number(self, pattern: str) -> int | None:
        match = re.search(pattern, self.rest)
        return int(match[1]) if match else None


@dataclasses.dataclass
class Cost:
    """Cost of a part of a program on a device."""

    moved: float = 0.0  # bytes that its operations read from and write to the device's memory
    cycles: float = 0.0  # the compiler's own estimate; 0 where it gives none
    kernels: float = 0.0  # of `moved`, by kernels, whose cycles the compiler does not know
    # (kind, mesh axes) → how often, bytes of the larger of input and result
    collectives: dict[tuple[str, str], np.ndarray] = dataclasses.field(
        default_factory=lambda: collections.defaultdict(lambda: np.zeros(2))
    )
    # What it is from, passes of one run (None: unknown) → how often it runs, cycles
    loops: dict[tuple[str, int | None], np.ndarray] = dataclasses.field(
        default_factory=lambda: collections.defaultdict(lambda: np.zeros(2))
    )
    each: "Cost | None" = None  # one pass of the loops of unknown length

    def add(self, other: "Cost", times: float = 1) -> None:
        self.moved += times * other.moved
        self.cycles += times * other.cycles
        self.kernels += times * other.kernels
        for mine, theirs in ((self.collectives, other.collectives), (self.loops, other.loops)):
            for key, numbers in theirs.items():
                mine[key] += times * numbers
        if other.each is not None:
            self.each = self.each or Cost()
            self.each.add(other.each, times)


class Module:
    """A parsed module of a program over a mesh, {axis: size}. live: share of the cache's slots that
    hold tokens."""

    def __init__(self, text: str, mesh: Mapping[str, int], live: float = 1.0):
        self.mesh = mesh
        self.live = live
        self.entry = ""
        self.computations: dict[str, dict[str, Instruction]] = {}
        current: dict[str, Instruction] = {}
        for line in text.splitlines():
            if match := _COMPUTATION.match(line):
                current = self.computations.setdefault(match[2], {})
                self.entry = match[2] if match[1] else self.entry
            elif match := _INSTRUCTION.match(line):
                current[match[2]] = _instruction(match[2], match[3], bool(match[1]))

    def cost(self, name: str = "") -> Cost:
        """Return the cost of a computation, by default of the whole program."""
        total = Cost()
        body = self.computations[name or self.entry]
        for op in body.values():
            if op.kind == "while":
                self._add_loop(total, op)
            elif op.kind == "conditional":
                branches = op.called("branch_computations") or [
                    *op.called("true_computation"), *op.called("false_computation")
                ]  # fmt: skip
                total.add(max(map(self.cost, branches), key=lambda cost: cost.moved))
            elif op.kind in ("call", "async-start"):
                for called in op.called("to_apply", "calls"):
                    total.add(self.cost(called))
            self._add_operation(total, op, body)
        return total

    def _add_operation(self, total: Cost, op: Instruction, body: dict[str, Instruction]) -> None:
        moved = 0 if op.kind in _FREE else self._moved(op, body)
        total.moved += moved
        total.kernels += moved if _is_kernel(op) else 0
        cycles = op.number(r'"estimated_cycles":"(\d+)"') or 0
        total.cycles += cycles if cycles < _IMPLAUSIBLE else 0
        inside = [self.computations[name] for name in op.called("calls")] if _fused(op) else []
        for one in [op, *(x for computation in inside for x in computation.values())]:
            if match := _COLLECTIVE.match(one.kind):
                operands = body if one is op else next(c for c in inside if one.name in c)
                sources = (operands[name].type for name in one.operands if name in operands)
                given, every = (
                    sum(nbytes(x, anywhere=True) for x in types) for types in (sources, [one.type])
                )
                # What starts one has both in its type.
                size = max(given, every - given if match[2] else every)
                total.collectives[match[1], self._axes(one)] += (1, size)

    def _add_loop(self, total: Cost, op: Instruction) -> None:
        (name,) = op.called("body")
        body = self.cost(name)
        passes = self._passes(op)
        source = re.search(r'op_name="([^"]*)"', op.rest)
        key = _short(source[1] if source else op.name), passes
        total.loops[key] += (1, body.cycles * (passes or 1))
        if passes is not None:
            total.add(body, passes)
            return
        total.each = total.each or Cost()
        inner = body.each
        body.each = None
        total.each.add(body)
        if inner is not None:
            total.each.add(inner)

    def _passes(self, op: Instruction) -> int | None:
        """Return how often a loop runs: as the compiler says, or the bound that its counter from 0
        is compared with. None where that is not known."""
        known = op.number(r'known_trip_count"?:\{"n":"(\d+)"')
        if known is not None:
            return known
        (name,) = op.called("condition")
        condition = self.computations[name]
        numbers = [x for x in condition.values() if x.kind == "constant"]
        (root,) = [x for x in condition.values() if x.root]
        if root.kind != "compare" or len(numbers) != 1 or "direction=LT" not in root.rest:
            return None
        return int(numbers[0].operands[0]) if numbers[0].operands[0].isdecimal() else None

    # Bytes -------------------------------------------------------------------------------------

    def _moved(self, op: Instruction, body: Mapping[str, Instruction]) -> int:
        """Bytes that an operation reads and writes; a slice is read, or written, alone."""
        if op.kind in _UPDATES:
            place = _UPDATES[op.kind]
            written = nbytes(body[op.operands[place]].type, anywhere=True)
            return _operand_bytes(op, body, place) + written
        if op.kind in _SLICES:
            read = nbytes(op.type, anywhere=True) if _operand_bytes(op, body, 0) else 0
            return read + nbytes(op.type)
        if op.kind.endswith("slice-start"):  # from main memory into a core's, ahead of its use
            given = sum(nbytes(body[x].type, anywhere=True) for x in op.operands if x in body)
            return max(nbytes(op.type, anywhere=True) - given, 0)
        if op.kind.endswith("-start"):
            return nbytes(op.type)  # a tuple of source and destination
        if op.kind.endswith("-done"):
            return 0
        if _is_kernel(op) and _OVER_CACHE.search(op.rest):
            sizes = [nbytes(body[x].type) for x in op.operands if x in body]
            cache = sum(size for size in sizes if size == max(sizes))
            return round(sum(sizes) - cache * (1 - self.live)) + nbytes(op.type)
        if not _fused(op):
            return nbytes(_WORKSPACE.sub(")", op.type)) + _operand_bytes(op, body)
        return self._moved_by_fusion(op, body)

    def _moved_by_fusion(self, op: Instruction, body: Mapping[str, Instruction]) -> int:
        (name,) = op.called("calls")
        sources = (body.get(operand) for operand in op.operands)
        sizes = [nbytes(source.type) if source else 0 for source in sources]
        read = sum(self._read(name, place, size)[0] for place, size in enumerate(sizes) if size)
        return read + self._written(name, nbytes(op.type))

    def _read(self, computation: str, place: int, whole: int) -> tuple[int, bool]:
        """Bytes that a fused computation reads of a parameter: of slices alone, and none where it
        is only written into; and whether its result is just a view of the parameter."""
        fused = self.computations[computation]
        parameters = (x for x in fused.values() if x.kind == "parameter")
        names = {x.name for x in parameters if int(x.operands[0]) == place}
        size = 0
        for user in fused.values():
            for number, operand in enumerate(user.operands):
                if operand not in names:
                    continue
                part = 0
                view = user.kind == "bitcast"
                if _fused(user):
                    part, view = self._read(user.called("calls")[0], number, whole)
                elif user.kind in _SLICES and not number:
                    part = nbytes(user.type, anywhere=True)
                elif not view and (user.kind not in _UPDATES or number):
                    return whole, False
                size += part
                if view:
                    names.add(user.name)  # users come after what they use
        return min(size, whole), any(fused[name].root for name in names)

    def _written(self, computation: str, whole: int, name: str = "") -> int:
        """Bytes that a fused computation writes for its result, or for one part of it."""
        fused = self.computations[computation]
        result = fused[name] if name else next(x for x in fused.values() if x.root)
        if result.kind in _UPDATES:
            update = fused[result.operands[_UPDATES[result.kind]]]
            return min(nbytes(update.type, anywhere=True), whole)
        if result.kind in ("bitcast", "convert", "copy"):
            return self._written(computation, whole, result.operands[0])
        if result.kind == "tuple":
            parts = ((x, nbytes(fused[x].type)) for x in result.operands)
            return min(sum(self._written(computation, size, x) for x, size in parts), whole)
        return self._written(result.called("calls")[0], whole) if _fused(result) else whole

    # Axes --------------------------------------------------------------------------------------

    def _axes(self, op: Instruction) -> str:
        """The axes of the mesh that a collective joins devices over, as data x fsdp."""
        shape = tuple(self.mesh.values())
        names = tuple(self.mesh)
        varying: set[str] = set()
        for group in groups_of(op.rest, math.prod(shape)):
            coordinates = np.stack(np.unravel_index(group, shape))
            spread = np.ptp(coordinates, axis=1) > 0
            varying |= {name for name, differs in zip(names, spread) if differs}
        return " x ".join(name for name in names if name in varying) or "-"


def groups_of(text: str, devices: int) -> Iterator[np.ndarray]:
    """The groups of devices of a collective: {{0,1},{2,3}}, or [2,2]<=[4] with a transposition, or
    mesh['a'=2,'b'=2] {'a'}, where 'a':(2)4 is the part of 4 after one of 2."""
    if named := re.search(r"replica_groups=mesh\[([^\]]*)\][^{]*\{([^}]*)\}", text):
        chosen = re.findall(r"'([^']+)'(?::\((\d+)\)(\d+))?", named[2])
        parts = {axis: (int(before), int(size)) for axis, before, size in chosen if size}
        whole = {axis for axis, _, size in chosen if not size}
        shape = []
        places = []
        for axis, size in re.findall(r"'([^']+)'=(\d+)", named[1]):
            before, part = parts.get(axis, (1, int(size)))
            if axis in parts or axis in whole:
                places.append(len(shape) + 1)
            shape += [before, part, int(size) // before // part]
        groups = np.moveaxis(np.arange(devices).reshape(shape), places, range(-len(places), 0))
        yield from groups.reshape(-1, math.prod(shape[place] for place in places))
        return
    iota = re.search(
        r"(?:replica_groups|source_target_pairs)=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", text
    )
    if iota:
        shape, tiles, order = (tuple(map(int, x.split(","))) if x else None for x in iota.groups())
        yield from np.arange(devices).reshape(tiles).transpose(order).reshape(shape)
        return
    listed = re.search(r"(?:replica_groups|source_target_pairs)=\{(\{.*?\})\}", text)
    if listed:
        for group in re.findall(r"\{([\d,]+)\}", listed[1]):
            yield np.array(group.split(","), int)
    elif "replica_groups={}" in text:
        yield np.arange(devices)


def nbytes(type: str, *, anywhere: bool = False) -> int:
    """Bytes of the arrays of an HLO type that lie in the device's main memory. anywhere: in the
    memory of a core too."""
    return sum(
        _BYTES[name] * math.prod(int(n) for n in shape.split(",") if n)
        for name, shape, layout in _ARRAY.findall(type)
        if anywhere or "S(" not in layout
    )


def _operand_bytes(op: Instruction, body: Mapping[str, Instruction], *places: int) -> int:
    names = [op.operands[place] for place in places] or op.operands
    return sum(nbytes(body[name].type) for name in names if name in body)


def _is_kernel(op: Instruction) -> bool:
    return op.kind == "custom-call" and bool(_KERNEL.search(op.rest))


def _fused(op: Instruction) -> bool:
    return op.kind == "fusion"


def _instruction(name: str, text: str, root: bool) -> Instruction:
    end = _closing(text, 0) + 1 if text.startswith("(") else text.index(" ")
    kind, _, rest = text[end:].strip().partition("(")
    close = _closing(f"({rest}", 0)
    inside = rest[: close - 1]
    operands = re.findall(r"%([\w.\-]+)", inside)
    if kind in ("parameter", "constant"):
        operands = [inside]
    return Instruction(name, text[:end], kind.strip(), tuple(operands), rest[close:], root)


def _closing(text: str, start: int) -> int:
    """The place of the bracket that closes the one at `start`."""
    depth = 0
    for place in range(start, len(text)):
        depth += (text[place] == "(") - (text[place] == ")")
        if not depth:
            return place
    return len(text) - 1


def _short(source: str) -> str:
    """Shorten jit(update)/while/body/closed_call/scan → update/while/scan."""
    names = [re.sub(r"^jit\((\w+)\)$", r"\1", name) for name in source.split("/")]
    return "/".join(n for n in names if n not in ("body", "closed_call", "jit", "checkpoint"))

"""Reads an optimized HLO module: its collectives, by axes of the mesh.

A loop whose number of passes the compiler knows counts that often. The others, such as the loop
over tokens or over micro-batches, count once and apart. Of a conditional the branch that sends most
bytes counts. Sizes are those of one device.
"""

import collections
import math
import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np

_BYTES = {
    "pred": 1, "s8": 1, "u8": 1, "f8e4m3fn": 1, "f8e5m2": 1, "s16": 2, "u16": 2, "f16": 2,
    "bf16": 2, "s32": 4, "u32": 4, "f32": 4, "s64": 8, "u64": 8, "f64": 8, "c64": 8,
}  # fmt: skip
_ARRAY = re.compile(rf"\b({'|'.join(_BYTES)})\[([\d,]*)\]")
_INSTRUCTION = re.compile(
    r"\s+(?:ROOT )?%?(?P<name>[\w.\-]+) = (?P<type>\(.*?\)|\S+) (?P<kind>[\w\-]+)"
    r"\((?P<rest>.*)$"
)
_COMPUTATION = re.compile(r"(ENTRY )?%?([\w.\-]+) \(.*->.*\{\s*$")
_COLLECTIVE = re.compile(
    "(all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute|ragged-all-to-all"
    "|collective-broadcast)$"
)

# (kind, mesh axes, whether in a loop of unknown length) → how often, bytes of the larger of input
# and result
Collectives = dict[tuple[str, str, bool], np.ndarray]


class Instruction(NamedTuple):
    type: str
    kind: str
    operands: str
    attributes: str

    def called(self, *names: str) -> list[str]:
        """Return the computations under these attributes."""
        found = []
        for name in names:
            if match := re.search(rf"\b{name}=(\{{[^}}]*\}}|%?[\w.\-]+)", self.attributes):
                found += re.findall(r"[\w.\-]+", match[1])
        return found


class Module:
    """A parsed module of a program over a mesh, {axis: size}."""

    def __init__(self, text: str, mesh: Mapping[str, int]):
        self.mesh = mesh
        self.entry = ""
        self.computations: dict[str, dict[str, Instruction]] = {}
        current: dict[str, Instruction] = {}
        for line in text.splitlines():
            if match := _COMPUTATION.match(line):
                current = self.computations.setdefault(match[2], {})
                self.entry = match[2] if match[1] else self.entry
            elif match := _INSTRUCTION.match(line):
                inside, *attributes = re.split(r"\)(?:, |$)", match["rest"], maxsplit=1)
                op = Instruction(match["type"], match["kind"], inside, *attributes)
                current[match["name"]] = op

    def collectives(self, computation: str = "") -> Collectives:
        """Return those of a computation, by default of the whole program."""
        total: Collectives = collections.defaultdict(lambda: np.zeros(2))
        body = self.computations[computation or self.entry]
        for op in body.values():
            if op.kind == "while":
                (inside,) = op.called("body")
                known = re.search(r'known_trip_count"?:\{"n":"(\d+)"', op.attributes)
                _add(total, self.collectives(inside), int(known[1]) if known else None)
            elif op.kind == "conditional":
                names = ("branch_computations", "true_computation", "false_computation")
                branches = map(self.collectives, op.called(*names))
                _add(total, max(branches, key=lambda x: sum(size for _, size in x.values())))
            elif match := _COLLECTIVE.match(op.kind):
                sources = re.findall(r"%([\w.\-]+)", op.operands)
                given = sum(nbytes(body[name].type) for name in sources if name in body)
                total[match[1], self._axes(op), False] += (1, max(given, nbytes(op.type)))
            else:
                for inside in op.called("to_apply", "calls"):
                    _add(total, self.collectives(inside))
        return total

    def _axes(self, op: Instruction) -> str:
        """Return the axes of the mesh that a collective joins devices over, as data x fsdp."""
        shape = tuple(self.mesh.values())
        varying: set[str] = set()
        for group in groups_of(op.attributes, math.prod(shape)):
            coordinates = np.stack(np.unravel_index(group, shape))
            spread = np.ptp(coordinates, axis=1) > 0
            varying |= {name for name, differs in zip(self.mesh, spread) if differs}
        return " x ".join(name for name in self.mesh if name in varying) or "-"


def _add(total: Collectives, part: Collectives, times: int | None = 1) -> None:
    """Add a part of a program that runs this many times; None: unknown."""
    for (kind, axes, in_loop), numbers in part.items():
        once = in_loop or times is None
        total[kind, axes, once] += numbers * (1 if once else times)


def groups_of(text: str, devices: int) -> Iterator[np.ndarray]:
    """Yield a collective's groups of devices: {{0,1},{2,3}}, or [2,2]<=[4] with a transposition, or
    mesh['a'=2,'b'=2] {'a'}, where 'a':(2)4 is the part of 4 after one of 2; its devices may be
    listed in another order, device_ids=([4,2]T(1,0))."""
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
        ids = np.arange(devices)
        if moved := re.search(r"device_ids=\(\[([\d,]+)\]T\(([\d,]+)\)\)", text):
            tiles, order = (tuple(map(int, x.split(","))) for x in moved.groups())
            ids = ids.reshape(tiles).transpose(order)
        groups = np.moveaxis(ids.reshape(shape), places, range(-len(places), 0))
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


def nbytes(type: str) -> int:
    """Return the bytes of the arrays of an HLO type."""
    return sum(
        _BYTES[name] * math.prod(int(n) for n in shape.split(",") if n)
        for name, shape in _ARRAY.findall(type)
    )

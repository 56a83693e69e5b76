"""The few program shapes of a rollout: rows, cache windows, admissions, verification widths.

Worked example: 64 rows in groups of 4, 32 response slots, 8 prompt slots, 4 row rungs, 2 windows,
steps of up to 4 tokens, a mesh that cuts the batch in 2: rows (64, 32, 16, 8), admissions
(64, 32, 16, 8), responses (16, 32), slots 8 + 16 and 8 + 32, one verification width, 32 (more only
where they are 32 apart).
"""

import dataclasses

NARROW = 32  # tokens; verification widths further apart than that are worth a program


@dataclasses.dataclass(frozen=True)
class Buckets:
    """rows: descending. responses: ascending lengths that end a window.

    admissions: descending, rows that begin together; whole groups that divide over the mesh.
    verify: ascending widths of verification. max_width: of a decode step.
    """

    rows: tuple[int, ...]
    admissions: tuple[int, ...]
    responses: tuple[int, ...]
    verify: tuple[int, ...]
    prompt_slots: int
    max_width: int = 1

    @classmethod
    def build(
        cls,
        rows: int,
        prompt_slots: int,
        response_slots: int,
        row_buckets: int,
        cache_lengths: int,
        *,
        multiple: int = 1,
        group_size: int = 1,
        max_width: int = 1,
        verify_width: int = 0,
    ) -> "Ladder":
        """Halve the rows `row_buckets` - 1 times (multiples of `multiple`), and so the lengths."""
        halved = {
            max(-(-rows // 2**i // multiple) * multiple, multiple) for i in range(row_buckets)
        }
        whole = multiple * group_size
        admitted = {max(n // whole, 1) * whole for n in halved}
        lengths = {max(-(-response_slots // 2**i), 1) for i in range(cache_lengths)}
        chunk = min(verify_width or response_slots, response_slots)
        parts = min(max(chunk // NARROW, 1), 4)
        return cls(
            rows=tuple(sorted(halved | {max(admitted)}, reverse=True)),
            admissions=tuple(sorted(admitted, reverse=True)),
            responses=tuple(sorted(lengths)),
            verify=tuple(-(-chunk * part // parts) for part in range(1, parts + 1)),
            prompt_slots=prompt_slots,
            max_width=max_width,
        )

    @property
    def widths(self) -> tuple[int, ...]:
        """Widths of a decode step: 1, 2, 4, ... and the widest."""
        widest = self.max_width
        return tuple(sorted({min(2**i, widest) for i in range(widest.bit_length() + 1)}))

    def rows_for(self, active: int) -> int:
        """The smallest rung that holds `active` rows."""
        return min(rows for rows in self.rows if rows >= active)

    def rows_below(self, rows: int) -> int:
        """The next smaller rung (0 under the smallest): decoding stops once so few are active."""
        return max((r for r in self.rows if r < rows), default=0)

    def response_for(self, length: int) -> int:
        """The shortest response rung that holds `length` tokens, or the longest."""
        return min((r for r in self.responses if r >= length), default=self.responses[-1])

    def slots(self, response: int) -> int:
        """Cache slots of a window that ends at `response` tokens: none behind it for candidates,
        which plain steps would have to read too, but enough for the widest step's own tokens."""
        return self.prompt_slots + max(response, self.max_width)

    def slots_for(self, length: int) -> int:
        """Cache slots of the shallowest window that holds `length` tokens, or of the deepest."""
        return self.slots(self.response_for(length))

    def admission(self, waiting: int, room: int) -> int:
        """How many rows begin together: as few as hold all that wait, as many as there is room.

        0 where there is no room.
        """
        fits = [n for n in self.admissions if n <= room]
        enough = [n for n in fits if n >= waiting]
        return min(enough) if enough else max(fits, default=0)

    def verify_width(self, longest: int) -> int:
        """The narrowest verification that takes in `longest` draft tokens, or the widest."""
        return min((w for w in self.verify if w >= longest), default=self.verify[-1])

    def verify_slots(self, width: int, longest: int) -> int:
        """Cache slots to verify drafts of at most `longest` tokens, `width` of them at a time: a
        pass begins behind what a row has."""
        if longest <= width:
            return self.prompt_slots + width
        return self.prompt_slots + self.response_for(longest) + width

"""The few program shapes of a rollout: rows, cache windows, verification widths.

Worked example: 64 rows, 32 response slots, 8 prompt slots, 4 row rungs, 2 windows, a mesh that
cuts the batch in 2: rows (64, 32, 16, 8), responses (16, 32), windows (24, 40).
"""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Ladder:
    """rows: descending. responses: ascending response lengths that end a window or a width."""

    rows: tuple[int, ...]
    responses: tuple[int, ...]
    prompt_slots: int

    @classmethod
    def build(
        cls,
        rows: int,
        prompt_slots: int,
        response_slots: int,
        row_rungs: int,
        windows: int,
        multiple: int = 1,
    ) -> "Ladder":
        """Halve the rows `row_rungs` - 1 times (multiples of `multiple`), and so the lengths."""
        halved = {max(-(-rows // 2**i // multiple) * multiple, multiple) for i in range(row_rungs)}
        lengths = {max(-(-response_slots // 2**i), 1) for i in range(windows)}
        return cls(tuple(sorted(halved, reverse=True)), tuple(sorted(lengths)), prompt_slots)

    def rows_for(self, active: int) -> int:
        """The smallest rung that holds `active` rows."""
        return min(rows for rows in self.rows if rows >= active)

    def rows_below(self, rows: int) -> int:
        """The next smaller rung (0 under the smallest): decoding stops once so few are active."""
        return max((r for r in self.rows if r < rows), default=0)

    def response_for(self, length: int) -> int:
        """The shortest response rung that holds `length` tokens."""
        return min(r for r in self.responses if r >= length)

    def window(self, response: int) -> int:
        """Cache slots for a response rung."""
        return self.prompt_slots + response

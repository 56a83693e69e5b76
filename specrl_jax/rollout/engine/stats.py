"""Cost of a rollout: seconds, steps and tokens."""

import dataclasses
from collections.abc import Sequence

from specrl_jax.rollout.engine.decode import StepCounts


@dataclasses.dataclass
class Stats:
    """Cost of a rollout. Seconds are wall-clock and include waiting for the device."""

    extend_seconds: float = 0.0
    decode_seconds: float = 0.0
    decode_steps: int = 0
    row_steps: int = 0  # rows x decode steps computed, fillers included
    extended_tokens: int = 0  # tokens that `extend` computed, padding included
    verified_tokens: int = 0  # of these, tokens of drafts that were not rejected before
    accepted_tokens: int = 0  # of these, accepted
    drafted_tokens: int = 0  # tokens of drafts in decode steps that were emitted
    # (rows, width, steps) of the decode loops, in order.
    decode_runs: list[tuple[int, int, int]] = dataclasses.field(default_factory=list)

    def add_decode(self, rows: int, width: int, counts: StepCounts, seconds: float) -> None:
        """Count steps of a batch."""
        steps = int(counts.steps)
        self.decode_seconds += seconds
        self.decode_steps += steps
        self.row_steps += steps * rows
        self.drafted_tokens += int(counts.drafted)
        self.decode_runs.append((rows, width, steps))

    def add_extension(self, tokens: int, verified: int, accepted: int, seconds: float) -> None:
        """Count rows that began: tokens that were computed, and those of drafts."""
        self.extend_seconds += seconds
        self.extended_tokens += tokens
        self.verified_tokens += verified
        self.accepted_tokens += accepted

    @classmethod
    def total(cls, parts: Sequence["Stats"]) -> "Stats":
        """Add up several rollouts, one after another."""
        total = cls()
        for part in parts:
            for field in dataclasses.fields(cls):
                old, new = getattr(total, field.name), getattr(part, field.name)
                setattr(total, field.name, old + new)
        return total

    def metrics(self) -> dict[str, float]:
        """Return the cost under the names of `metrics.METRICS`."""
        values = {
            "time/extend": self.extend_seconds,
            "time/decode": self.decode_seconds,
            "rollout/decode_steps": self.decode_steps,
            "rollout/row_steps": self.row_steps,
            "rollout/tokens_drafted": self.drafted_tokens,
            "rollout/tokens_extended": self.extended_tokens,
            "rollout/tokens_verified": self.verified_tokens,
        }
        if self.row_steps:
            fed = sum(size * steps * width for size, width, steps in self.decode_runs)
            wide = sum(size * steps for size, width, steps in self.decode_runs if width > 1)
            values["rollout/width_mean"] = fed / self.row_steps
            values["rollout/width_max"] = max(w for _, w, steps in self.decode_runs if steps)
            values["rollout/wide_fraction"] = wide / self.row_steps
        return values

"""Cost of a rollout: seconds, steps, tokens and programs."""

import dataclasses
from collections.abc import Sequence

from specrl_jax.rollout.engine.decode import StepCounts


@dataclasses.dataclass
class Stats:
    """Cost of a rollout. Seconds are wall-clock and include waiting for the device."""

    prefill_seconds: float = 0.0
    verify_seconds: float = 0.0
    decode_seconds: float = 0.0
    # What the step costs predicted; 0 without them.
    predicted_seconds: float = 0.0
    predicted_verify_seconds: float = 0.0
    decode_steps: int = 0
    row_steps: int = 0  # rows x decode steps computed, fillers included
    verify_work: int = 0  # tokens that the verification passes computed, padding included
    verified_tokens: int = 0  # of these, tokens of drafts that were not rejected before
    accepted_tokens: int = 0  # of these, accepted
    drafted_tokens: int = 0  # the draft source's tokens that were emitted
    # (rows, cache slots, width, steps) of the decode loops, in order.
    decode_runs: list[tuple[int, int, int, int]] = dataclasses.field(default_factory=list)
    # (name, shapes and flags) of the programs that ran the policy.
    programs: set[tuple] = dataclasses.field(default_factory=set)

    def add_decode(
        self, shape: tuple[int, int], width: int, counts: StepCounts, seconds: float
    ) -> None:
        """Steps of a batch of (rows, cache slots)."""
        steps = int(counts.steps)
        self.decode_seconds += seconds
        self.decode_steps += steps
        self.row_steps += steps * shape[0]
        self.drafted_tokens += int(counts.drafted)
        self.decode_runs.append((*shape, width, steps))

    def add_verification(self, rows: int, width: int, counts: StepCounts, seconds: float) -> None:
        self.verify_seconds += seconds
        self.verify_work += rows * width
        self.verified_tokens += int(counts.verified)
        self.accepted_tokens += int(counts.accepted)

    @classmethod
    def total(cls, parts: Sequence["Stats"]) -> "Stats":
        """Add up several rollouts, one after another."""
        total = cls()
        for part in parts:
            for field in dataclasses.fields(cls):
                old, new = getattr(total, field.name), getattr(part, field.name)
                setattr(total, field.name, old | new if isinstance(old, set) else old + new)
        return total

    def metrics(self) -> dict[str, float]:
        """Return the cost under the names of `metrics.METRICS`."""
        values = {
            "time/prefill": self.prefill_seconds,
            "time/verify": self.verify_seconds,
            "time/decode": self.decode_seconds,
            "rollout/decode_steps": self.decode_steps,
            "rollout/row_steps": self.row_steps,
            "rollout/tokens_drafted": self.drafted_tokens,
            "rollout/verify_work": self.verify_work,
            "rollout/tokens_verified": self.verified_tokens,
            "rollout/programs": len(self.programs),
        }
        if self.row_steps:
            fed = sum(size * steps * width for size, _, width, steps in self.decode_runs)
            wide = sum(size * steps for size, _, width, steps in self.decode_runs if width > 1)
            values["rollout/width_mean"] = fed / self.row_steps
            values["rollout/width_max"] = max(w for _, _, w, steps in self.decode_runs if steps)
            values["rollout/wide_fraction"] = wide / self.row_steps
        if self.predicted_seconds:
            values["time/decode_predicted"] = self.predicted_seconds
        if self.predicted_verify_seconds:
            values["time/verify_predicted"] = self.predicted_verify_seconds
        return values

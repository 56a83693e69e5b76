"""What a rollout cost: seconds, steps, tokens, bytes and programs."""

import dataclasses
from collections.abc import Sequence


@dataclasses.dataclass
class Stats:
    """What a rollout cost. Seconds are wall-clock and include waiting for the device.

    row_steps: rows x decode steps actually computed, the work behind `decode_seconds`.
    verified_tokens: rows x width of the verification passes; judged_tokens: those that belonged to
    a draft not rejected before, kept_tokens: those that passes kept. drafted_tokens: tree draft
    tokens that were emitted. visits: (rows, slots, width, steps) of the decode loops, in order.
    predicted_seconds, predicted_verify_seconds: what the cost model expected of `decode_seconds`
    and `verify_seconds`; 0 without one. evicted: rows that gave up their cache, to be replayed
    later unless they were run ahead. cache_bytes: the most that KV caches held at once over all
    devices, copies made on the move included. programs: shapes of the programs that run the policy:
    (name, ...).
    """

    prefill_seconds: float = 0.0
    verify_seconds: float = 0.0
    decode_seconds: float = 0.0
    predicted_seconds: float = 0.0
    predicted_verify_seconds: float = 0.0
    decode_steps: int = 0
    row_steps: int = 0
    verified_tokens: int = 0
    judged_tokens: int = 0
    kept_tokens: int = 0
    drafted_tokens: int = 0
    evicted: int = 0
    cache_bytes: int = 0
    visits: list[tuple[int, int, int, int]] = dataclasses.field(default_factory=list)
    programs: set[tuple] = dataclasses.field(default_factory=set)

    @classmethod
    def total(cls, parts: Sequence["Stats"]) -> "Stats":
        """Of several rollouts, one after another."""
        found = cls()
        for part in parts:
            for field in dataclasses.fields(cls):
                old, new = getattr(found, field.name), getattr(part, field.name)
                together = old | new if field.name == "programs" else old + new
                setattr(found, field.name, together)
        return dataclasses.replace(found, cache_bytes=max(x.cache_bytes for x in parts))

    def metrics(self) -> dict[str, float]:
        """Under the names of `metrics.METRICS`."""
        values = {
            "time/prefill": self.prefill_seconds,
            "time/verify": self.verify_seconds,
            "time/decode": self.decode_seconds,
            "rollout/decode_steps": self.decode_steps,
            "rollout/row_steps": self.row_steps,
            "rollout/tokens_drafted": self.drafted_tokens,
            "rollout/verify_work": self.verified_tokens,
            "rollout/tokens_verified": self.judged_tokens,
            "rollout/preempted": self.evicted,
            "rollout/cache_gib": self.cache_bytes / 2**30,
            "rollout/programs": len(self.programs),
        }
        if self.row_steps:
            fed = sum(size * steps * width for size, _, width, steps in self.visits)
            wide = sum(size * steps for size, _, width, steps in self.visits if width > 1)
            values["rollout/width_mean"] = fed / self.row_steps
            values["rollout/width_max"] = max(w for _, _, w, steps in self.visits if steps)
            values["rollout/wide_fraction"] = wide / self.row_steps
        if self.predicted_seconds:
            values["time/decode_predicted"] = self.predicted_seconds
        if self.predicted_verify_seconds:
            values["time/verify_predicted"] = self.predicted_verify_seconds
        return values

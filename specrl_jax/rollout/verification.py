"""Choice of which drafts to verify, by the cost and benefit of verification.

`prefill` spends time on each draft slot, and each accepted token saves the time of a decode step.
Both are timed once, when a run starts. The run counts the slots computed and the tokens accepted,
separately for rows on fresh and on reused noise: the latter accept far more. Drafts that cost more
than they save are skipped, except those of a few groups, which show when that changes.

Applies only to rules that sample every token: with them a row has the same tokens without a draft.
A choice is a pure function of `Verification.host()`, so a resumed run repeats it.

Worked example: a slot takes 3 ms, a decoded token 6 ms. On reused noise 1,000 slots were computed
for 700 accepted tokens: 3.0 s to save 4.2 s. On fresh noise 400 slots for 100 tokens: 1.2 s to save
0.6 s. Drafts of rows on fresh noise are now skipped.
"""

import dataclasses
import time
from collections.abc import Mapping

import numpy as np

from specrl_jax import hosts
from specrl_jax.models.transformer import Params
from specrl_jax.rollout.drafts.edit import without_drafts
from specrl_jax.rollout.engine.runner import Runner
from specrl_jax.rollout.engine.speculation import TIMED_CALLS, time_steps
from specrl_jax.rollout.generate import RolloutResult
from specrl_jax.rollout.requests import Requests
from specrl_jax.rollout.spec import RolloutSpec
from specrl_jax.sharding import put
from specrl_jax.types import Drafts, Rollout, StatePart

FADE = 0.75  # weight of older counts, after each rollout
PROBED_GROUPS = 16  # when drafts are skipped, one group in 16 still verifies its own
KINDS = ("fresh", "reused")  # of noise; indexes the lists below


@dataclasses.dataclass
class Verification(StatePart):
    """Counts of verified drafts by the kind of noise of their rows, and the resulting choices.

    Without timings all drafts are verified.
    """

    # Seconds per `prefill` slot and per decoded token; None: not timed yet.
    seconds: tuple[float, float] | None = None
    slots: list[float] = dataclasses.field(default_factory=lambda: [0.0, 0.0])
    accepted: list[float] = dataclasses.field(default_factory=lambda: [0.0, 0.0])
    skips: list[bool] = dataclasses.field(default_factory=lambda: [False, False])
    # Rows with drafts since `take_metrics`, and how many of them skipped verification.
    _drafted: int = 0
    _skipped: int = 0

    def review(self) -> list[str]:
        """Choose from what is known; return a line for each choice that has changed."""
        lines = []
        for kind, name in enumerate(KINDS):
            if self.seconds is None or not self.slots[kind]:
                continue
            cost = self.slots[kind] * self.seconds[0]
            saved = self.accepted[kind] * self.seconds[1]
            skips = cost > saved
            if skips != self.skips[kind]:
                what = f"not verified, except 1 group in {PROBED_GROUPS}" if skips else "verified"
                share = f"{cost / saved:.1f} x" if saved else "more than"
                lines.append(
                    f"drafts on {name} noise cost {share} what they save: from now on {what} "
                    "(rollout.adaptive)"
                )
            self.skips[kind] = skips
        return lines

    def skip(self, requests: Requests) -> Requests:
        """Return the requests without the drafts that cost more than they save."""
        if requests.drafts is None:
            return requests
        kinds = _kinds(requests)
        groups = np.arange(len(requests.prompts.lens)) + requests.noise.step
        probed = np.repeat(groups % PROBED_GROUPS == 0, len(kinds) // len(groups))
        skipped = np.array(self.skips)[kinds] & ~probed
        drafted = hosts.fetch(requests.drafts.lens) > 0
        self._drafted += int(drafted.sum())
        self._skipped += int((drafted & skipped).sum())
        if not skipped.any():
            return requests
        drafts = without_drafts(requests.drafts, put(skipped, "batch"))
        return dataclasses.replace(requests, drafts=drafts)

    def observe(self, requests: Requests, result: RolloutResult) -> None:
        """Count a rollout's drafts: slots computed for them, and tokens accepted."""
        if requests.drafts is None:
            return
        kinds = _kinds(requests)
        # A row that resumes has accepted tokens of earlier drafts as well.
        accepted = np.minimum(hosts.fetch(result.rollout.prefix_lens), result.draft_lens)
        slots = _draft_slots(result.draft_lens, accepted, result.stats.draft_slots)
        for kind in range(len(KINDS)):
            here = (kinds == kind) & (result.draft_lens > 0)
            if here.any():
                self.slots[kind] = self.slots[kind] * FADE + float(slots[here].sum())
                self.accepted[kind] = self.accepted[kind] * FADE + float(accepted[here].sum())

    def take_metrics(self) -> dict[str, float]:
        """Return the share of drafts that were not verified since the last call."""
        drafted = self._drafted
        skipped = self._skipped
        self._drafted = 0
        self._skipped = 0
        return {"rollout/drafts_skipped": skipped / drafted} if drafted else {}

    def host(self) -> dict:
        """Return everything that choices depend on, as values that JSON preserves exactly."""
        return {  # copies: a checkpoint may be written while the next step counts
            "seconds": self.seconds,
            "slots": [*self.slots],
            "accepted": [*self.accepted],
            "skips": [*self.skips],
        }

    def restore(self, host: Mapping, arrays: object = None) -> "Verification":
        """Return a `Verification` that continues where `host` was taken."""
        seconds = host["seconds"]
        return Verification(**{**host, "seconds": tuple(seconds) if seconds else None})


def _kinds(requests: Requests) -> np.ndarray:
    """Return the kind of each row's noise, int [B]: 0 fresh, 1 of an earlier step."""
    groups = len(requests.prompts.lens)
    steps = requests.noise.steps_of(groups, len(requests.drafts.lens) // groups)
    return (steps.reshape(-1) < requests.noise.step).astype(int)


def _draft_slots(draft_lens: np.ndarray, accepted: np.ndarray, slots: float) -> np.ndarray:
    """Return the slots that were computed for each row's draft, float [B].

    draft_lens, accepted: int [B]. slots: of all drafts. A draft is computed up to its first
    rejection; beyond that, the same share in all rows.
    """
    decided = np.minimum(draft_lens, accepted + 1)
    rest = draft_lens - decided
    share = np.clip((slots - decided.sum()) / max(rest.sum(), 1), 0, 1)
    computed = decided + share * rest
    return computed * slots / max(computed.sum(), 1)


def time_verification(
    spec: RolloutSpec, weights: Params, requests: Requests
) -> tuple[float, float]:
    """Time a slot of `prefill`, and a token of a full-batch decode step, in seconds.

    The synthetic rows have half a response, whose tokens cost as much as a draft's.
    """
    requests = _half_done(spec, requests)
    seconds = []
    for _ in range(TIMED_CALLS):
        runner = Runner(spec, weights, requests)
        first = np.arange(runner.buckets.refill)
        start = time.perf_counter()
        runner.admit([first + shard * runner.shard_rows for shard in range(runner.buckets.shards)])
        seconds.append((time.perf_counter() - start) / runner.stats.prefilled_tokens)
    size = runner.buckets.sizes[0]
    decode = time_steps(spec, weights, requests, sizes=(size,), widths=(1,))
    return hosts.broadcast(min(seconds)), decode[size, 1] / size


def _half_done(spec: RolloutSpec, requests: Requests) -> Requests:
    """Return requests whose rows have half a response of random tokens."""
    rows = len(requests.prompts.lens) * spec.group_size
    slots = spec.response_slots
    ids = np.random.default_rng(0).integers(spec.model.vocab_size, size=(rows, slots))
    ids = put(ids.astype(np.int32), "batch", None)
    lens = put(np.full(rows, slots // 2, np.int32), "batch")
    empty = Rollout.empty(rows, slots, spec.stored_logprobs, routing=spec.routing)
    tokens = dataclasses.replace(empty.tokens, ids=ids)
    held = Rollout(tokens, lens, empty.prefix_lens)
    drafts = Drafts(dataclasses.replace(requests.drafts.tokens, ids=ids), lens)
    return dataclasses.replace(requests, held=held, drafts=drafts)

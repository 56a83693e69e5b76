"""Earlier responses, kept as drafts, keyed by (prompt_id, sample).

In: a batch's `Rollout` and the step it is from. Out: `Drafts` (SPEC-RL, arXiv 2509.23232) or all
that is stored of a batch's prompts, for a draft source (SRT, arXiv 2601.09083).

Which prompt has which slot of the arrays, and in which order they were stored, only the host
knows. When all slots are taken, the prompt that was stored longest ago gives its slot up.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jax import Array

from specrl_jax.rollout.drafts.store_memory import (
    DeviceMemory,
    HostMemory,
    Stored,
    StoreShape,
    pick_drafts,
    pick_sources,
)
from specrl_jax.sharding import put
from specrl_jax.types import Drafts, Prompts, Rollout, StatePart

KINDS = {"device": DeviceMemory, "host": HostMemory}
_NEVER = np.iinfo(np.int32).max


class DraftStore(StatePart):
    """The last responses of every prompt and sample.

    Batches of Q prompts are split over the batch axes, which must divide Q. `step` is always the
    step whose rollout is drafted or stored.

    Args:
      shape: how much is kept.
      max_age: steps after which a response is not a draft any more; 0: never.
      kind: "device" or "host", the memory that the arrays live in. Results are the same.
      owner: what the tokens and log-probs are of, e.g. {"tokenizer": ..., "model": ...}
        fingerprints; a saved store of another owner is refused.
    """

    def __init__(
        self,
        shape: StoreShape,
        *,
        max_age: int = 0,
        kind: str = "device",
        owner: Mapping[str, str] | None = None,
    ):
        self._shape = {
            "generations": max(shape.history, shape.generations),
            "generations with log-probs": shape.generations,
            "prompts": shape.prompts,
            "samples": shape.samples,
            "slots": shape.response_slots,
            "k": shape.k,
        }
        self._max_age, self._owner = max_age, dict(owner or {})
        self._read = shape.read
        self._slots: dict[str, int] = {}  # by prompt_id, the one stored longest ago first
        self._unsolved: set[str] = set()  # prompt_ids whose newest responses were marked so
        self._memory = KINDS[kind](shape.abstract())

    def get(self, prompts: Prompts, age: int = 1, *, step: int) -> Drafts:
        """Drafts [Q * G] for the prompts' groups; zeros, length 0, where there is none.

        `age` 1 is the newest response, 2 the one before: SPEC-RL's delayed reuse (ablations). At
        most the generations that are kept with log-probs.
        """
        slots = self._find(prompts)
        return pick_drafts(*self._memory.rows(slots), self._oldest(slots, step), age)

    def sources(self, prompts: Prompts, *, step: int) -> tuple[Array, Array]:
        """The prompts' last `history` responses, whole on every device: tokens [Q, E * G, R], lens
        [Q, E * G], the newest generation first; zeros, length 0, where there is none."""
        slots = self._find(prompts)
        tokens, lens = pick_sources(*self._memory.rows(slots), self._oldest(slots, step))
        return tokens[:, : self._read], lens[:, : self._read]

    def unsolved(self, prompts: Prompts) -> np.ndarray:
        """bool [Q], the prompts whose newest responses `put` was told to be unsolved."""
        return np.asarray([e.prompt_id in self._unsolved for e in prompts.examples])

    def put(
        self, prompts: Prompts, rollout: Rollout, *, step: int, unsolved: np.ndarray | None = None
    ) -> None:
        """Store the groups' responses; older generations move back by one.

        unsolved: bool [Q], groups that have no right response and teach nothing; None: none.
        Raises ValueError where a prompt comes twice.
        """
        names = [e.prompt_id for e in prompts.examples]
        slots, reassigned = self._take(names)
        self._unsolved -= set(names)
        if unsolved is not None:
            self._unsolved |= {name for name, marked in zip(names, unsolved) if marked}
        newest = Stored.of(rollout, steps=np.full(rollout.lens.shape, step, np.int32))
        self._memory.write(slots, reassigned, newest)

    def arrays(self) -> Stored:
        """What a checkpoint saves, jax or NumPy. The next `put` changes or frees them."""
        return self._memory.arrays

    def like(self) -> Stored:
        """Shapes, dtypes and layouts that a checkpoint of either kind is read back with."""
        return self._memory.like

    def nbytes(self) -> dict[str, int]:
        """Bytes in use, over all devices, as {"device": ..., "host": ...}."""
        return self._memory.nbytes()

    def host(self) -> dict[str, Any]:
        """The host's part of a checkpoint, JSON-able; `arrays` is the other."""
        return {
            "slots": list(self._slots.items()),
            "unsolved": sorted(self._unsolved),
            "shape": self._shape,
            "owner": self._owner,
        }

    def restore(self, host: Mapping[str, Any], arrays: Stored) -> "DraftStore":
        """Take over a saved store of either kind; `arrays` are the store's own from then on.

        Raises ValueError where it is of another tokenizer, model or shape.
        """
        for field, own in self._owner.items():
            if (saved := host["owner"][field]) != own:
                raise ValueError(
                    f"{field}.source must be the {field} whose drafts the checkpoint holds, "
                    f"{saved}, got {own}; set it back, or give another --workdir"
                )
        saved = host["shape"]
        if changed := [name for name, own in self._shape.items() if saved[name] != own]:
            was = ", ".join(f"{name} = {saved[name]}" for name in changed)
            now = ", ".join(f"{name} = {self._shape[name]}" for name in changed)
            raise ValueError(
                f"draft store: saved with {was}; this run has {now}; "
                "resume with the same data and rollout settings"
            )
        self._slots = dict(host["slots"])
        self._unsolved = set(host.get("unsolved", ()))
        self._memory.load(arrays)
        return self

    def _find(self, prompts: Prompts) -> np.ndarray:
        """The prompts' slots, int32 [Q]; -1 for those that are not stored."""
        return np.asarray([self._slots.get(e.prompt_id, -1) for e in prompts.examples], np.int32)

    def _oldest(self, slots: np.ndarray, step: int) -> Array:
        """The earliest step, int32 [Q], whose responses are drafts; none of unknown prompts."""
        oldest = step - self._max_age if self._max_age else np.iinfo(np.int32).min
        return put(np.where(slots >= 0, oldest, _NEVER).astype(np.int32), "batch")

    def _take(self, names: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        """Slots int32 [Q] to store the prompts in, and which of them, bool [Q], were not theirs."""
        if len(set(names)) < len(names):
            raise ValueError("the draft store cannot store a prompt twice in one batch")
        # The batch's own prompts are out of the queue before anyone has to give way.
        known = {name: self._slots.pop(name) for name in names if name in self._slots}
        used, slots = len(self._slots) + len(known), []
        for name in names:
            if name in known:
                slots.append(known[name])
            elif used < self._shape["prompts"]:
                slots.append(used)
                used += 1
            else:
                slots.append(self._slots.pop(next(iter(self._slots))))
        self._slots |= dict(zip(names, slots))
        return np.asarray(slots, np.int32), np.asarray([name not in known for name in names])

"""Earlier responses, kept as drafts on the device, keyed by (prompt_id, sample).

In: a batch's `Rollout` and its step. Out: `Drafts` (SPEC-RL, arXiv 2509.23232), or everything
stored for a batch's prompts, for a draft source (SRT, arXiv 2601.09083).

Only the host knows each prompt's slot of the arrays, and the order in which prompts were stored.
When all slots are taken, the prompt that was stored longest ago is evicted.
"""

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from specrl_jax import abstract
from specrl_jax.sharding import axes, put, reshape, shards
from specrl_jax.types import Drafts, Prompts, Rollout, StatePart, Tokens

# N is a multiple of this. Meshes whose shard counts divide it have arrays of the same shape, so a
# run can resume on any of them.
_SLOTS = 64
_NEVER = np.iinfo(np.int32).max


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Stored:
    """Arrays of the store, split over N, or a batch's rows of them.

    N prompts, G samples. Generation 0 is the newest. The newest A generations keep everything that
    the acceptance rule reads, E >= A generations keep tokens and lengths.
    """

    tokens: Tokens  # ids [E, N, G, R], all else [A, N, G, R] and [A, N, G, R, k]
    lens: Array  # int32 [E, N, G], 0 if nothing is stored
    steps: Array  # int32 [E, N, G], step in which the response was stored


@dataclasses.dataclass(frozen=True)
class StoreShape:
    """Sizes of a store: number of prompts, and what it keeps for each."""

    prompts: int  # at least a batch's
    samples: int  # G, responses per prompt
    response_slots: int  # R
    generations: int = 1  # A, responses of each sample that are drafts: `get` up to this age
    history: int = 0  # responses of each sample that `DraftStore.history` returns; 0: A
    k: int = 0  # likeliest tokens whose log-probs are kept
    logprobs: bool = True  # log-probs and origins of the drafts are kept

    def empty(self) -> Stored:
        """Return a store's arrays, zeros, on the mesh in use; prompts are rounded up."""
        pieces = math.lcm(_SLOTS, shards("batch"))
        prompts = -(-self.prompts // pieces) * pieces
        kept = max(self.history, self.generations)

        def array(dtype, generations: int, *rest: int) -> Array:
            shape = generations, prompts, self.samples, *rest
            return jnp.zeros(shape, dtype, out_sharding=_layout(len(shape)))

        slots = self.response_slots
        columns = {}
        if self.logprobs:
            columns["sampling_logprobs"] = array(jnp.float32, self.generations, slots)
            columns["origin_logprobs"] = array(jnp.float32, self.generations, slots)
            columns["origin_steps"] = array(jnp.int32, self.generations, slots)
        if self.k:
            columns["top_ids"] = array(jnp.int32, self.generations, slots, self.k)
            columns["top_logprobs"] = array(jnp.float32, self.generations, slots, self.k)
        tokens = Tokens(ids=array(jnp.int32, kept, slots), **columns)
        return Stored(tokens, lens=array(jnp.int32, kept), steps=array(jnp.int32, kept))


class DraftStore(StatePart):
    """Last responses of every prompt and sample.

    Batches of Q prompts are split over the batch axes, which must divide Q. `step` is always the
    step whose rollout is drafted or stored.

    Args:
      shape: how much is kept.
      max_age: steps after which a response is no longer used as a draft; 0: never.
      owner: fingerprints of the tokenizer and model that made tokens and log-probs, as
        {"tokenizer": ..., "model": ...}; a saved store with another owner is rejected.
    """

    def __init__(
        self, shape: StoreShape, *, max_age: int = 0, owner: Mapping[str, str] | None = None
    ):
        self._shape = {
            "generations": max(shape.history, shape.generations),
            "generations with log-probs": shape.generations * shape.logprobs,
            "prompts": shape.prompts,
            "samples": shape.samples,
            "slots": shape.response_slots,
            "k": shape.k,
        }
        self._max_age = max_age
        self._owner = dict(owner or {})
        self._history = shape.history or shape.generations
        self._slots: dict[str, int] = {}  # by prompt_id, in the order of storage
        self._arrays = shape.empty()

    def get(self, prompts: Prompts, age: int = 1, *, step: int) -> Drafts:
        """Return drafts [Q * G] for the prompts' groups; zeros of length 0 if there is none.

        age: 1 for the newest response, 2 for the one before (SPEC-RL's delayed reuse, an ablation),
        at most `StoreShape.generations`.
        """
        return pick_drafts(self._arrays, *self._find(prompts, step), age=age)

    def history(self, prompts: Prompts, *, step: int) -> tuple[Array, Array]:
        """Return a `DraftHistory` of the prompts' last E = `StoreShape.history` responses: tokens
        [Q, E, G, R] and lens [Q, E, G] on every device. Zeros of length 0 if there is none."""
        tokens, lens = pick_history(self._arrays, *self._find(prompts, step))
        return tokens[:, : self._history], lens[:, : self._history]

    def put(self, prompts: Prompts, rollout: Rollout, *, step: int) -> None:
        """Store the groups' responses; older generations move back by one.

        Raises ValueError if a prompt occurs twice.
        """
        names = [e.key for e in prompts.examples]
        slots, reassigned = self._take(names)
        tokens = rollout.tokens.like(self._arrays.tokens)
        newest = Stored(tokens, rollout.lens, np.full(rollout.lens.shape, step, np.int32))
        self._arrays = write_newest(self._arrays, put(slots, None), put(reassigned, None), newest)

    def arrays(self) -> Stored:
        """Return the arrays that a checkpoint saves. The next `put` frees them."""
        return self._arrays

    @property
    def nbytes(self) -> int:
        """Bytes of the arrays, over all devices."""
        return sum(x.nbytes for x in jax.tree.leaves(self._arrays))

    def host(self) -> dict[str, Any]:
        """Return the host's part of a checkpoint, JSON-able; `arrays` is the other."""
        return {
            "slots": list(self._slots.items()),
            "shape": self._shape,
            "owner": self._owner,
        }

    def restore(self, host: Mapping[str, Any], arrays: Stored) -> "DraftStore":
        """Restore a saved store; the store owns `arrays` from then on.

        Raises ValueError if the saved store has another tokenizer, model or shape.
        """
        for field, own in self._owner.items():
            if (saved := host["owner"][field]) != own:
                raise ValueError(
                    f"{field}.source must be the {field} of the checkpoint's drafts, "
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
        self._arrays = arrays
        return self

    def _find(self, prompts: Prompts, step: int) -> tuple[Array, Array]:
        """Return each prompt's slot and the earliest step whose responses are drafts, int32 [Q].

        A prompt that is not stored gets slot 0 and a step after all others: it has no drafts.
        """
        slots = np.asarray([self._slots.get(e.key, -1) for e in prompts.examples], np.int32)
        oldest = step - self._max_age if self._max_age else np.iinfo(np.int32).min
        oldest = np.where(slots >= 0, oldest, _NEVER).astype(np.int32)
        return put(np.maximum(slots, 0), "batch"), put(oldest, "batch")

    def _take(self, names: Sequence[str]) -> tuple[np.ndarray, np.ndarray]:
        """Return slots int32 [Q] for the prompts, and bool [Q], slots that were reassigned."""
        if len(set(names)) < len(names):
            raise ValueError("the draft store cannot store a prompt twice in one batch")
        # Remove the batch's own prompts first, so that they keep their slots.
        known = {name: self._slots.pop(name) for name in names if name in self._slots}
        used = len(self._slots) + len(known)
        slots = []
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


@functools.partial(jax.jit, static_argnames="age")
def pick_drafts(stored: Stored, slots: Array, oldest: Array, age: int) -> Drafts:
    """Return drafts [Q * G] of generation `age`, 1 the newest; zeros for responses too old.

    slots: int32 [Q], of the prompts. oldest: int32 [Q], the earliest step whose responses are
    drafts.
    """

    def pick(array: Array) -> Array:
        rest = (None,) * (array.ndim - 2)
        return array.at[age - 1, slots].get(out_sharding=axes("batch", *rest))

    young = pick(stored.steps) >= oldest[:, None]

    def draft(array: Array) -> Array:
        rows = _keep(pick(array), young)
        return reshape(rows, (-1, *rows.shape[2:]), "batch", *(None,) * (rows.ndim - 2))

    return jax.tree.map(draft, Drafts(stored.tokens, stored.lens))


def pick_inputs(stored: Stored, prompts: int) -> tuple:
    """Return the inputs of `pick_drafts` and `pick_history` for this many prompts."""
    numbers = abstract.array(np.int32, (prompts,), "batch")
    return stored, numbers, numbers


@jax.jit
def pick_history(stored: Stored, slots: Array, oldest: Array) -> tuple[Array, Array]:
    """Return a `DraftHistory` of all generations; arguments: see `pick_drafts`."""

    def pick(array: Array) -> Array:
        """Pick [E, N, G, ...] → [Q, E, G, ...] on every device."""
        rows = array.at[:, _whole(slots)].get(out_sharding=jax.P(*(None,) * array.ndim))
        return jnp.swapaxes(rows, 0, 1)

    young = pick(stored.steps) >= _whole(oldest)[:, None, None]
    return _keep(pick(stored.tokens.ids), young), _keep(pick(stored.lens), young)


@functools.partial(jax.jit, donate_argnums=0)
def write_newest(stored: Stored, slots: Array, reassigned: Array, newest: Stored) -> Stored:
    """Write `newest` [Q * G] as generation 0 of the prompts; older generations move back by one.

    slots: int32 [Q], of the prompts. reassigned: bool [Q], slots that were another prompt's.
    """
    prompts = slots.shape[0]

    def write(array: Array, new: Array) -> Array:
        new = _whole(new)
        new = new.reshape(1, prompts, -1, *new.shape[1:])
        before = array.at[:, slots].get(out_sharding=jax.P(*(None,) * array.ndim))
        before = jax.vmap(_keep, in_axes=(0, None))(before, ~reassigned)
        moved = jnp.concatenate([new, before[:-1]])
        # The partitioner chooses the scatter's layout; the result has the store's layout.
        scatter = jax.sharding.auto_axes(
            lambda array, moved, slots: array.at[:, slots].set(moved),
            out_sharding=_layout(array.ndim),
        )
        return scatter(array, moved, slots)

    return jax.tree.map(write, stored, newest)


def _layout(ndim: int) -> jax.P:
    return axes(None, "batch", *(None,) * (ndim - 2))


def _whole(array: Array) -> Array:
    """Replicate the array on every device."""
    return jax.sharding.reshard(array, jax.P(*(None,) * array.ndim))


def _keep(array: Array, kept: Array) -> Array:
    """Zero the rows that are not kept: they may belong to another prompt."""
    # A row from another device arrives as a sum with zeros, which turns -0 into +0. Here -0 becomes
    # +0 in every row, so all meshes agree.
    kept = kept.reshape(*kept.shape, *(1,) * (array.ndim - kept.ndim))
    return jnp.where(kept & (array != 0), array, jnp.zeros((), array.dtype))

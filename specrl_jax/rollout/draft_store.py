"""Earlier responses, kept on the device as drafts, keyed by (prompt_id, sample).

Arrays are [A, N, G, R]: A generations (0 the newest), N prompts, G samples, R response slots. The
host keeps only which prompt has which slot. When all slots are taken, the prompt that was stored
longest ago gives its slot up; with a capacity of the whole data set none ever does.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from specrl_jax.sharding import merge_rows, put, shards, spec
from specrl_jax.types import Drafts, Prompts, Rollout


class DraftStore:
    """The last `generations` responses of every prompt and sample.

    `get` at age 1 offers the newest; at age 2 the one before, SPEC-RL's delayed reuse (arXiv
    2509.23232, ablations).
    """

    def __init__(self, prompts: int, samples: int, response_slots: int, generations: int = 1):
        pieces = shards("batch")
        self._capacity = -(-prompts // pieces) * pieces
        shape = (generations, self._capacity, samples, response_slots)
        self._slots: dict[str, int] = {}  # in order of last use
        self.arrays = _empty(shape)

    @property
    def nbytes(self) -> int:
        return sum(x.nbytes for x in jax.tree.leaves(self.arrays))

    def get(self, prompts: Prompts, group_size: int, age: int = 1) -> Drafts:
        """Drafts [Q * G] for the prompts' groups; length 0 where there is none."""
        slots = [self._slots.get(e.prompt_id, -1) for e in prompts.examples]
        return _get(self.arrays, put(np.asarray(slots, np.int32), "batch"), group_size, age)

    def put(self, prompts: Prompts, rollout: Rollout) -> None:
        """Store the groups' responses; older generations move back by one.

        Samples beyond the store's are not kept; a smaller group leaves the other samples as they
        were.
        """
        slots = np.asarray([self._slot(e.prompt_id) for e in prompts.examples], np.int32)
        newest = Drafts(
            rollout.tokens,
            rollout.lens,
            rollout.sampling_logprobs,
            rollout.origin_logprobs,
            rollout.origin_steps,
        )
        self.arrays = _put(self.arrays, put(slots, None), newest)

    def state(self) -> dict:
        """The host's part, JSON-able; `arrays` is the device's."""
        return {"slots": list(self._slots.items())}

    def restore(self, state: dict, arrays: Drafts) -> None:
        """Take over a saved store. Raises ValueError where its shape is not this one's."""
        saved, own = arrays.tokens.shape, self.arrays.tokens.shape
        if saved != own:
            raise ValueError(
                f"draft store: saved as [generations, prompts, samples, slots] = {saved}, this run "
                f"has {own}; resume with the same data and rollout settings"
            )
        self._slots = dict(state["slots"])
        self.arrays = arrays

    def _slot(self, prompt_id: str) -> int:
        slot = self._slots.pop(prompt_id, None)
        if slot is None and len(self._slots) < self._capacity:
            slot = len(self._slots)
        elif slot is None:
            slot = self._slots.pop(next(iter(self._slots)))
            self._forget(slot)
        self._slots[prompt_id] = slot
        return slot

    def _forget(self, slot: int) -> None:
        lens = _clear(self.arrays.lens, slot)
        self.arrays = dataclasses.replace(self.arrays, lens=lens)


def _empty(shape: tuple[int, int, int, int]) -> Drafts:
    def zeros(dtype, *dims: int) -> Array:
        axes = (None, "batch", *(None,) * (len(dims) - 2))
        return jnp.zeros(dims, dtype, out_sharding=spec(*axes))

    return Drafts(
        tokens=zeros(jnp.int32, *shape),
        lens=zeros(jnp.int32, *shape[:3]),
        sampling_logprobs=zeros(jnp.float32, *shape),
        origin_logprobs=zeros(jnp.float32, *shape),
        origin_steps=zeros(jnp.int32, *shape),
    )


@functools.partial(jax.jit, static_argnames=("group_size", "age"))
def _get(arrays: Drafts, slots: Array, group_size: int, age: int) -> Drafts:
    known = slots >= 0

    def pick(stored: Array) -> Array:
        rest = (None,) * (stored.ndim - 2)
        rows = stored[age - 1].at[jnp.maximum(slots, 0)].get(out_sharding=spec("batch", *rest))
        missing = max(group_size - rows.shape[1], 0)
        rows = jnp.pad(rows[:, :group_size], [(0, 0), (0, missing)] + [(0, 0)] * (rows.ndim - 2))
        return merge_rows(rows, *rest[1:])

    drafts = jax.tree.map(pick, arrays)
    known = jnp.broadcast_to(
        known[:, None], (known.shape[0], group_size), out_sharding=spec("batch", None)
    )
    return dataclasses.replace(drafts, lens=jnp.where(merge_rows(known), drafts.lens, 0))


@functools.partial(jax.jit, donate_argnums=0)
def _put(arrays: Drafts, slots: Array, newest: Drafts) -> Drafts:
    prompts = slots.shape[0]

    def write(stored: Array, new: Array) -> Array:
        new = new.reshape(prompts, -1, *new.shape[1:])[:, : stored.shape[2]]
        new = jax.sharding.reshard(new, jax.P(*(None,) * new.ndim))
        samples = new.shape[1]
        rest = (None,) * (stored.ndim - 2)
        before = stored[:, :, :samples].at[:, slots].get(out_sharding=jax.P(None, None, *rest))
        moved = jnp.concatenate([new[None], before[:-1]])

        def scatter(stored: Array, moved: Array, slots: Array) -> Array:
            return stored.at[:, slots, :samples].set(moved)

        # The scatter's layout is the partitioner's business; the result keeps the store's.
        out = jax.P(None, *spec("batch"), *rest)
        return jax.sharding.auto_axes(scatter, out_sharding=out)(stored, moved, slots)

    return jax.tree.map(write, arrays, newest)


@functools.partial(jax.jit, donate_argnums=0)
def _clear(lens: Array, slot: Array) -> Array:
    here = jnp.arange(lens.shape[1]) == slot
    return jnp.where(here[None, :, None], 0, lens)

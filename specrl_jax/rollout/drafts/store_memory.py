"""Where the draft store's arrays lie: in device memory, or in host memory.

In: slots of prompts and what is to be written there. Out: a batch's `Drafts`, or all responses of
its prompts. Two depths: the newest A generations keep all that the acceptance rules read, E >= A
generations keep tokens and lengths. Generation 0 is the newest:

    tokens, lens, steps                       [E, N, G, ...]    N prompts, G samples
    sampling_logprobs, origin_*, top_*        [A, N, G, ...]    of the same responses

Device memory is split over N. In host memory the arrays are NumPy's, not JAX's "pinned_host":
rows of those can only be picked by a program that computes on the host, while NumPy changes its
arrays in place; and a transfer of picked rows is asynchronous just as well.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from specrl_jax import hosts
from specrl_jax.sharding import put, reshape, shards, spec
from specrl_jax.types import Drafts, Rollout

# N is a multiple of this: the same shape, and so resumable, on all meshes whose pieces divide it.
_SLOTS = 64


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Stored:
    """The store's arrays, or a batch's rows of them."""

    tokens: Array  # int32 [E, N, G, R]
    lens: Array  # int32 [E, N, G], 0 where nothing is stored
    steps: Array  # int32 [E, N, G], when the response was stored
    # As in `Drafts`, [A, N, G, R] and [A, N, G, R, k]:
    sampling_logprobs: Array
    origin_logprobs: Array
    origin_steps: Array
    top_ids: Array | None = None
    top_logprobs: Array | None = None

    @classmethod
    def of(cls, rollout: Rollout, steps: Array) -> "Stored":
        """The rollout's responses [B], stored in `steps` int32 [B]."""
        return cls(**vars(Drafts.of(rollout)), steps=steps)


@dataclasses.dataclass(frozen=True)
class StoreShape:
    """What a store keeps of how many prompts."""

    prompts: int  # no less than a batch has
    samples: int  # G, responses of each prompt
    response_slots: int  # R
    generations: int = 1  # A, responses of each sample kept with log-probs: `get` up to this age
    history: int = 0  # responses of each sample that `sources` returns; 0: A
    k: int = 0  # likeliest tokens whose log-probs are kept

    @property
    def read(self) -> int:
        """Responses of a prompt that `DraftStore.sources` returns."""
        return (self.history or self.generations) * self.samples

    def abstract(self) -> Stored:
        """Shapes, dtypes and layouts of the arrays on the mesh in use; prompts are rounded up."""
        pieces = math.lcm(_SLOTS, shards("batch"))
        prompts = -(-self.prompts // pieces) * pieces
        kept, with_logprobs = max(self.history, self.generations), self.generations

        def array(dtype, generations: int, *rest: int) -> jax.ShapeDtypeStruct:
            shape = generations, prompts, self.samples, *rest
            return jax.ShapeDtypeStruct(shape, dtype, sharding=_sharding(len(shape)))

        slots, top = self.response_slots, (self.response_slots, self.k)
        return Stored(
            tokens=array(jnp.int32, kept, slots),
            lens=array(jnp.int32, kept),
            steps=array(jnp.int32, kept),
            sampling_logprobs=array(jnp.float32, with_logprobs, slots),
            origin_logprobs=array(jnp.float32, with_logprobs, slots),
            origin_steps=array(jnp.int32, with_logprobs, slots),
            top_ids=array(jnp.int32, with_logprobs, *top) if self.k else None,
            top_logprobs=array(jnp.float32, with_logprobs, *top) if self.k else None,
        )


class _Memory:
    arrays: Stored
    jax_kind: str

    @property
    def like(self) -> Stored:
        """Shapes, dtypes and layouts that a checkpoint of either kind is read back with."""

        def abstract(x: Array | np.ndarray) -> jax.ShapeDtypeStruct:
            layout = _sharding(x.ndim, self.jax_kind)
            return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=layout)

        return jax.tree.map(abstract, self.arrays)


class DeviceMemory(_Memory):
    """The arrays, split over the prompts on the batch axes."""

    jax_kind = "device"

    def __init__(self, abstract: Stored):
        def zeros(x: jax.ShapeDtypeStruct) -> Array:
            return jnp.zeros(x.shape, x.dtype, out_sharding=_layout(x.ndim))

        self.arrays = jax.tree.map(zeros, abstract)

    def nbytes(self) -> dict[str, int]:
        return {"device": _nbytes(self.arrays), "host": 0}

    def rows(self, slots: np.ndarray) -> tuple[Stored, Array | None]:
        """Arrays on the device and the places in them, int32 [Q], of the rows in `slots`."""
        return self.arrays, put(np.maximum(slots, 0), "batch")

    def write(self, slots: np.ndarray, reassigned: np.ndarray, newest: Stored) -> None:
        self.arrays = write_newest(self.arrays, put(slots, None), put(reassigned, None), newest)

    def load(self, arrays: Stored) -> None:
        self.arrays = jax.tree.map(
            lambda own, x: jax.device_put(x, own.sharding), self.arrays, arrays
        )


class HostMemory(_Memory):
    """NumPy arrays, changed in place; a batch's rows are copied to the device to be read."""

    jax_kind = "pinned_host"  # how a checkpoint is read: past the device's memory

    def __init__(self, abstract: Stored):
        if jax.process_count() > 1:
            count = jax.process_count()
            raise ValueError(f"rollout.store must be device with {count} processes, got host")
        self.arrays = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), abstract)

    def nbytes(self) -> dict[str, int]:
        return {"device": 0, "host": _nbytes(self.arrays)}

    def rows(self, slots: np.ndarray) -> tuple[Stored, Array | None]:
        """The rows in `slots` alone, on the device."""
        index = np.maximum(slots, 0)

        def copy(stored: np.ndarray) -> Array:
            # np.take copies, so that jax may keep the memory as it is.
            return jax.device_put(np.take(stored, index, axis=1), _sharding(stored.ndim))

        return jax.tree.map(copy, self.arrays), None

    def write(self, slots: np.ndarray, reassigned: np.ndarray, newest: Stored) -> None:
        for stored, new in zip(
            jax.tree.leaves(self.arrays), jax.tree.leaves(hosts.fetch(newest)), strict=True
        ):
            stored[:, slots[reassigned]] = 0
            for generation in range(len(stored) - 1, 0, -1):
                stored[generation][slots] = stored[generation - 1][slots]
            stored[0][slots] = new.reshape(len(slots), -1, *new.shape[1:])

    def load(self, arrays: Stored) -> None:
        self.arrays = jax.tree.map(np.array, arrays)  # our own: jax's memory must not change


@functools.partial(jax.jit, static_argnames="age")
def pick_drafts(stored: Stored, index: Array | None, oldest: Array, age: int) -> Drafts:
    """Drafts [Q * G] of generation `age`, 1 the newest.

    stored: arrays that hold the prompts' rows. index: int32 [Q], places of the rows in them; None:
    they are the rows, in this order. oldest: int32 [Q], the earliest step whose responses are
    drafts; zeros elsewhere.
    """

    def pick(array: Array) -> Array:
        rest = (None,) * (array.ndim - 2)
        if index is None:
            return array[age - 1]
        return array.at[age - 1, index].get(out_sharding=spec("batch", *rest))

    young = pick(stored.steps) >= oldest[:, None]

    def draft(array: Array) -> Array:
        rows = _keep(pick(array), young)
        return reshape(rows, (-1, *rows.shape[2:]), "batch", *(None,) * (rows.ndim - 2))

    return jax.tree.map(draft, Drafts.of(stored))


@jax.jit
def pick_sources(stored: Stored, index: Array | None, oldest: Array) -> tuple[Array, Array]:
    """Tokens [Q, E * G, R] and lengths [Q, E * G] of all generations, arguments as above."""

    def pick(array: Array) -> Array:
        """[E, N, G, ...] → [Q, E * G, ...] on every device."""
        if index is not None:
            out = jax.P(*(None,) * array.ndim)
            array = array.at[:, _whole(index)].get(out_sharding=out)
        rows = jnp.swapaxes(_whole(array), 0, 1)
        return rows.reshape(rows.shape[0], -1, *rows.shape[3:])

    young = pick(stored.steps) >= _whole(oldest)[:, None]
    return _keep(pick(stored.tokens), young), _keep(pick(stored.lens), young)


@functools.partial(jax.jit, donate_argnums=0)
def write_newest(stored: Stored, slots: Array, reassigned: Array, newest: Stored) -> Stored:
    """The arrays with `newest` [Q * G] as generation 0 of the prompts in `slots` int32 [Q]; older
    ones move back by one. reassigned: bool [Q], prompts whose slots were another's."""
    prompts = slots.shape[0]

    def write(array: Array, new: Array) -> Array:
        new = _whole(new)
        new = new.reshape(1, prompts, -1, *new.shape[1:])
        before = array.at[:, slots].get(out_sharding=jax.P(*(None,) * array.ndim))
        before = jax.vmap(_keep, in_axes=(0, None))(before, ~reassigned)
        moved = jnp.concatenate([new, before[:-1]])
        # The scatter's layout is the partitioner's business; the result keeps the store's.
        scatter = jax.sharding.auto_axes(
            lambda array, moved, slots: array.at[:, slots].set(moved),
            out_sharding=_layout(array.ndim),
        )
        return scatter(array, moved, slots)

    return jax.tree.map(write, stored, newest)


def _layout(ndim: int) -> jax.P:
    return spec(None, "batch", *(None,) * (ndim - 2))


def _sharding(ndim: int, kind: str = "device") -> jax.sharding.NamedSharding:
    mesh = jax.sharding.get_mesh()
    return jax.sharding.NamedSharding(mesh, _layout(ndim), memory_kind=kind)


def _whole(array: Array) -> Array:
    """The array on every device."""
    return jax.sharding.reshard(array, jax.P(*(None,) * array.ndim))


def _nbytes(stored: Stored) -> int:
    return sum(x.nbytes for x in jax.tree.leaves(stored))


def _keep(array: Array, kept: Array) -> Array:
    """Zeros in the rows that are not kept: they may be another prompt's.

    A row fetched from another device is a sum with zeros, which makes +0 of -0: so here for all.
    """
    kept = kept.reshape(*kept.shape, *(1,) * (array.ndim - kept.ndim))
    return jnp.where(kept & (array != 0), array, jnp.zeros((), array.dtype))

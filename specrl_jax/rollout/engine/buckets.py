"""Shapes of a rollout's programs, which follow from the configuration alone.

Worked example: 64 rows, 32 response slots, 8 prompt slots, 4 row buckets, steps of up to 4 tokens,
and a mesh that splits the batch in 2, on a CPU. The sizes are (64, 32, 16, 8), the widths
(1, 2, 4). The cache has 8 + 32 + 3 slots. Packed sequences have 2 · (8 + 32) slots, and a chunk has
3 of them on each shard; if it is computed in windows, they are one sequence.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from specrl_jax.models.config import ModelConfig
from specrl_jax.models.kv_cache import round_slots
from specrl_jax.models.transformer import used_param_count
from specrl_jax.sharding import chunk_tokens, platform

# Draft tokens of a row that are verified together.
VERIFY_WIDTH = 32
WINDOW_VERIFY_WIDTH = 16  # with windows: slots behind a rejection are wasted work
# Slots of a shard per window of `prefill`, with windows; otherwise whole chunks.
WINDOW_SLOTS = {"cpu": 64}
# Parameters from which windows pay off: a slot of a smaller policy costs less than requesting it.
WINDOW_PARAMS = 2**22
# Slots of the sequences for short texts, when whole chunks are computed.
SHORT_SLOTS = 512
# Tokens of a row that `append` computes at a time.
FEED_WIDTH = {"cpu": 4}
FEED_WIDTH_ELSEWHERE = 128
# Bytes of a block's logits, and of its rows' keys and values.
BLOCK_BYTES = {"cpu": 2**26}
BLOCK_BYTES_ELSEWHERE = 2**29


class TextShape(NamedTuple):
    """Shape of packed texts."""

    slots: int  # of a sequence
    sequences: int  # per chunk, on each shard
    chunks: int  # maximum that the rows of a batch need


@dataclasses.dataclass(frozen=True)
class Buckets:
    """All shapes of a rollout's programs; a bucket is one of the `sizes` of its batch."""

    model: ModelConfig
    batch_size: int  # slots of the largest batch, a multiple of `shards`
    prompt_slots: int  # P
    response_slots: int  # R
    row_buckets: int  # number of batch sizes, each half the previous
    shards: int = 1  # of the batch
    max_width: int = 1  # of a decode step
    turns: bool = False  # whether rows continue after their environment has replied

    @functools.cached_property
    def sizes(self) -> tuple[int, ...]:
        """Batch sizes in slots, descending, each half the previous: multiples of `shards`."""
        own = (-(-self.batch_size // 2**i // self.shards) for i in range(self.row_buckets))
        return tuple(sorted({max(n, 1) * self.shards for n in own}, reverse=True))

    @functools.cached_property
    def cache_slots(self) -> int:
        """Slots of a row in the cache: its longest text, then a margin for the widest step."""
        width = max(self.max_width, self.append_width if self.turns else 1)
        return round_slots(self.prompt_slots + self.response_slots + width - 1)

    @property
    def refill(self) -> int:
        """Slots of a shard that must be free before waiting rows start: a quarter."""
        return max(self.sizes[0] // self.shards // 4, 1)

    @property
    def widths(self) -> tuple[int, ...]:
        """Widths of a decode step: 1, the widest, and half of it."""
        return tuple(sorted({1, max(self.max_width // 2, 1), self.max_width}))

    def size_for_shards(self, counts: Sequence[int] | np.ndarray) -> int:
        """Return the smallest bucket that holds `counts` rows [shards] on the shards."""
        most = int(np.max(counts)) * self.shards
        return min(size for size in self.sizes if size >= most)

    def size_below(self, size: int) -> int:
        """Return the next smaller bucket; 0 below the smallest."""
        return max((other for other in self.sizes if other < size), default=0)

    # Shapes of `prefill`

    @property
    def text_shapes(self) -> tuple["TextShape", ...]:
        """Shapes of packed texts, each a program of `prefill`; any text fits in the first.

        Whole chunks are mostly empty when only prompts start: the second is for short texts.
        """
        shapes = [TextShape(self.sequence_slots, self.chunk_sequences, self.chunks)]
        short = round_slots(SHORT_SLOTS)
        if not self.window_slots and 2 * short <= self.sequence_slots * self.chunk_sequences:
            shapes.append(TextShape(short, 1, self.sizes[0] // self.shards))
        return tuple(shapes)

    @property
    def groups_start_whole(self) -> bool:
        """Return whether a group's rows start together: later ones would recompute the prompt."""
        return len(self.text_shapes) > 1

    @functools.cached_property
    def window_slots(self) -> int:
        """Slots that a shard computes at a time; 0: a whole chunk."""
        return min(WINDOW_SLOTS[platform()], self.sequence_slots) if self._windows else 0

    @functools.cached_property
    def _pair_slots(self) -> int:
        """Slots of two rows of maximum length."""
        return round_slots(2 * (self.prompt_slots + self.response_slots))

    @functools.cached_property
    def _chunk_pairs(self) -> int:
        """Pairs of maximum-length rows that fit in a chunk on each shard."""
        pairs = max(chunk_tokens() // self._pair_slots, 1)
        return min(pairs, self.sizes[0] // self.shards)

    @functools.cached_property
    def _windows(self) -> bool:
        return platform() in WINDOW_SLOTS and used_param_count(self.model) >= WINDOW_PARAMS

    @property
    def sequence_slots(self) -> int:
        """Slots of a packed sequence, T."""
        return self._pair_slots * (self._chunk_pairs if self._windows else 1)

    @property
    def chunk_sequences(self) -> int:
        """Sequences of a chunk on each shard."""
        return 1 if self._windows else self._chunk_pairs

    @property
    def chunks(self) -> int:
        """Most chunks that the rows of a batch need: a pair's slots contain at least one row."""
        return -(-self.sizes[0] // self.shards // self._chunk_pairs)

    @property
    def verify_width(self) -> int:
        """Draft tokens of a row that are verified together."""
        width = WINDOW_VERIFY_WIDTH if self._windows else VERIFY_WIDTH
        return min(width, self.response_slots)

    @property
    def append_width(self) -> int:
        """Tokens of a row that `append` computes at a time."""
        width = FEED_WIDTH.get(platform(), FEED_WIDTH_ELSEWHERE)
        return min(width, self.response_slots)

    @functools.cached_property
    def block_rows(self) -> int:
        """Rows of a shard that are decided together."""
        model = self.model
        logits = self.verify_width * model.vocab_size * 4
        itemsize = jnp.dtype(model.dtype).itemsize
        cache = (
            2 * self.cache_slots * model.num_layers * model.num_kv_heads * model.head_dim * itemsize
        )
        fits = BLOCK_BYTES.get(platform(), BLOCK_BYTES_ELSEWHERE) // max(logits, cache)
        # A chunk has room for half as many rows of maximum length: most blocks are full then.
        few = 4 * self._chunk_pairs
        return min(max(fits, 1), few, self.sizes[0] // self.shards)

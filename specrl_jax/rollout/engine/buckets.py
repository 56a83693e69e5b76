"""Shapes of a rollout's programs. They follow from the configuration alone.

Worked example: 64 rows, 32 response slots, 8 prompt slots, 4 row buckets, steps of up to 4 tokens,
and a mesh that cuts the batch in 2, on a CPU. The sizes are (64, 32, 16, 8), and the widths
(1, 2, 4). The cache has 8 + 32 + 3 slots. Packed sequences have 2 · (8 + 32) slots, and a chunk has
3 of them on each shard.
"""

import dataclasses
import functools
from collections.abc import Sequence

import jax.numpy as jnp
import numpy as np

from specrl_jax.models.config import ModelConfig
from specrl_jax.models.kv_cache import round_slots
from specrl_jax.sharding import chunk_tokens, platform

VERIFY_WIDTH = 32  # draft tokens of a row that are decided together
# Tokens of a row that `feed` computes at once.
FEED_WIDTH = {"cpu": 4}
FEED_WIDTH_ELSEWHERE = 128
# Bytes of a block's logits, and of its rows' keys and values.
BLOCK_BYTES = {"cpu": 2**26}
BLOCK_BYTES_ELSEWHERE = 2**29


@dataclasses.dataclass(frozen=True)
class Buckets:
    """All shapes of a rollout's programs; a bucket is one of the `sizes` of its batch."""

    model: ModelConfig
    batch_size: int  # slots of the largest batch, a multiple of `shards`
    prompt_slots: int  # P
    response_slots: int  # R
    row_buckets: int  # number of batch sizes, each half the last
    shards: int = 1  # of the batch
    max_width: int = 1  # of a decode step
    turns: bool = False  # whether rows go on after their environment has answered

    @functools.cached_property
    def sizes(self) -> tuple[int, ...]:
        """Batch sizes in slots, descending, each half the last: multiples of `shards`."""
        own = (-(-self.batch_size // 2**i // self.shards) for i in range(self.row_buckets))
        return tuple(sorted({max(n, 1) * self.shards for n in own}, reverse=True))

    @functools.cached_property
    def cache_slots(self) -> int:
        """Slots of a row in the cache: its longest text, then a margin for the widest step."""
        width = max(self.max_width, self.feed_width if self.turns else 1)
        return round_slots(self.prompt_slots + self.response_slots + width - 1)

    @property
    def refill(self) -> int:
        """Slots of a shard that must be free before waiting rows begin: a quarter."""
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

    # Shapes of `extend`

    @functools.cached_property
    def sequence_slots(self) -> int:
        """Slots of a packed sequence, T: two of the longest rows."""
        return round_slots(2 * (self.prompt_slots + self.response_slots))

    @functools.cached_property
    def chunk_sequences(self) -> int:
        """Sequences of a chunk on each shard."""
        sequences = max(chunk_tokens() // self.sequence_slots, 1)
        return min(sequences, self.sizes[0] // self.shards)

    @property
    def chunks(self) -> int:
        """Most chunks that the rows of a batch need: a sequence holds at least one row."""
        return -(-self.sizes[0] // self.shards // self.chunk_sequences)

    @property
    def verify_width(self) -> int:
        """Draft tokens of a row that are decided together."""
        return min(VERIFY_WIDTH, self.response_slots)

    @property
    def feed_width(self) -> int:
        """Tokens of a row that `feed` computes at once."""
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
        # A chunk of the longest rows holds half as many rows: most blocks are full then.
        few = 4 * self.chunk_sequences
        return min(max(fits, 1), few, self.sizes[0] // self.shards)

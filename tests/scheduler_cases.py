"""The small rollouts that the scheduler's tests share: one layer, prompts of 6 slots, 8 tokens."""

import numpy as np
import rollout_reference as ref

from specrl_jax.models.kv_cache import cache_bytes

B, P, R = 32, 6, 8
NEVER = (99,)  # an end of sequence outside the vocabulary: only max_lens end a response
PROMPTS = ref.random_prompts()
MAX_LENS = np.random.default_rng(1).integers(1, R + 1, B).astype(np.int32)
DRAFT_FIELDS = ("prefix_lens", "sources")  # what drafts change under the match rule
SLOT_BYTES = cache_bytes(ref.ONE_LAYER, 1, 1)


def spec_of(width=1, **kwargs):
    return ref.match_spec(width, **{"eos": NEVER, "stored_logprobs": 3} | kwargs)


def go(spec, max_lens=MAX_LENS, prompts=PROMPTS, **kwargs):
    weights = ref.policy(0.0, ref.ONE_LAYER)[1]
    return ref.run(spec, weights, prompts, 1, max_lens=max_lens, **kwargs)


def bytes_for(count, width=1) -> float:
    """A bound that holds so many rows at the longest cache, while they are moved."""
    return 2.5 * count * (P + R + width - 1) * SLOT_BYTES


# 16 rows, 8 at the end.
FEW_BYTES = {"cache_lengths": 2, "row_buckets": 3, "cache_bytes": bytes_for(13)}

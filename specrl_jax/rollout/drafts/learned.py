"""Drafts of the learned head (`models.draft_head`), available from the very first token.

The head guesses one token after another, from its own states instead of the policy's. A guess is
drawn with *the noise that the policy will use* at that position. If TV is the total variation
between the policy's and the head's distributions p and q, both draw the same token with probability
at least (1 - TV) / (1 + TV) (Gumbel coupling, arXiv 2408.07978). Independent draws agree with
probability Σ p·q. With vocabularies that race twice (`sampling`) the former may be slightly less.
No distribution is stored, and the rollout equals the plain one, token for token.

The head's keys and values are the last layer of the cache. Slot s contains those of the token at
position s and the state that chose it:

    slot                p         p+1      p+2
    `propose`        h0, last   z1, d1              drafts d1, d2: a step of width 3
    policy              h1         h2       h3      samples d1, then w: two tokens
    `correct`                   h1, d1    h2, w     written over z1's; `last` is now w
"""

import jax
import jax.numpy as jnp
from jax import Array

from specrl_jax.models.draft_head import DraftHead
from specrl_jax.models.kv_cache import KVCache
from specrl_jax.models.transformer import Params, Transformer, final_logits, head_logits
from specrl_jax.rollout.rows import Rows
from specrl_jax.rollout.sampling import SamplingConfig, sample, temper, truncate
from specrl_jax.sharding import axes, reshard


class HeadDrafting:
    """Drafting by the head in a decode step, with the rollout's weights.

    sampling: of the guesses, with the policy's noise; at temperature 0 the likeliest token.
    """

    def __init__(self, sampling: SamplingConfig, model: Transformer, weights: Params):
        self.sampling = sampling
        self.model = model
        self.head = DraftHead(model.config, weights["draft_head"])
        self.vocab = weights["draft_head"].get("vocab")  # of a head that drafts only some tokens

    def propose(
        self, rows: Rows, start: Array, cache: KVCache, drafted: Array, counts: Array
    ) -> tuple[Array, KVCache]:
        """Return drafts int32 [b, W] with missing tokens guessed, and the head's layer.

        drafted: int32 [b, W], of which the first `counts` [b] tokens are given; the last column is
        unused. start: int32 [b], slot of `rows.last`. cache: the head's layer; this call writes the
        slots of `rows.last` and of the draft tokens that are fed.
        """
        (layer,) = cache
        width = drafted.shape[1]
        state = rows.last_state[:, None]
        token = rows.last[:, None]
        completed = []
        for k in range(width - 1):
            state, layer = self.head(state, self.model.lookup(token), start + k, layer)
            guess = self._draw(state, rows.seeds, rows.lens[:, None] + k)
            token = jnp.where(counts[:, None] > k, drafted[:, k : k + 1], guess)
            completed.append(token)
        if width == 1:  # later wider steps read the slot
            _, layer = self.head(state, self.model.lookup(token), start, layer)
        return jnp.concatenate([*completed, drafted[:, -1:]], axis=1), (layer,)

    def correct(self, start: Array, cache: KVCache, hidden: Array, tokens: Array) -> KVCache:
        """Return the head's layer with the drafts' slots recomputed from the policy's states.

        hidden: [b, W, D], the policy's states. tokens: int32 [b, W], sampled from them.
        """
        if tokens.shape[1] == 1:
            return cache
        (layer,) = cache
        # Only the keys and values are used, not the head's output.
        embedded = self.model.lookup(tokens[:, :-1])
        _, layer = self.head(hidden[:, :-1], embedded, start + 1, layer)
        return (layer,)

    def _draw(self, states: Array, seeds: Array, positions: Array) -> Array:
        """Draw the tokens [b, t] at `positions` of the response from the states [b, t, D]."""
        logits = truncate(temper(self._logits(states), self.sampling), self.sampling)
        return sample(logits, seeds, reshard(positions, "batch", None), self.sampling)[0]

    def _logits(self, states: Array) -> Array:
        """Return logits [b, t, V]; -inf at tokens that the head never drafts."""
        if self.vocab is None:
            return self.model.logits(states)
        config = self.model.config
        some = final_logits(head_logits(states, self.vocab["rows"]), config.replace(unused_ids=()))
        some = reshard(some, "batch", None, None)
        shape = (*states.shape[:2], config.vocab_size)
        nothing = jnp.full(shape, -jnp.inf, out_sharding=axes("batch", None, None))
        write = jax.vmap(jax.vmap(lambda row, values: row.at[self.vocab["ids"]].set(values)))
        return reshard(write(nothing, some), "batch", None, "vocab")

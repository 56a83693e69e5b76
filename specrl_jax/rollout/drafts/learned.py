"""Drafts of the learned head (`models.draft_head`), from the first token of the first epoch on.

The head guesses one token after another, each from its own state in the place of the policy's. A
guess is drawn with *the noise that the policy will use* at that position: where p and q are the
policy's and the head's distributions, both draw the same token with a chance of at least
(1 - TV) / (1 + TV) (Gumbel coupling, arXiv 2408.07978), where independent draws agree in Σ p·q.
Vocabularies that race twice (`sampling`) may agree in slightly less. No distribution is stored, and
the rollout is the plain one, token for token.

The head's keys and values are the last layer of the cache. Slot s holds those of the token at
position s and of the state that chose it:

    slot                p         p+1      p+2
    `propose`        h0, last   z1, d1              drafts d1, d2: a step of width 3
    policy              h1         h2       h3      samples d1, then w: two tokens
    `correct`                   h1, d1    h2, w     z1's are written over; `last` is now w
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
    """Drafting by the head in a decode step, over the rollout's weights.

    sampling: how guesses are drawn, with the policy's noise; at temperature 0 the likeliest token.
    """

    def __init__(self, sampling: SamplingConfig, model: Transformer, weights: Params):
        self.sampling = sampling
        self.model = model
        self.head = DraftHead(model.config, weights["draft_head"])
        self.vocab = weights["draft_head"].get("vocab")  # of a head that drafts some tokens alone

    def propose(
        self, rows: Rows, start: Array, cache: KVCache, drafted: Array, counts: Array
    ) -> tuple[Array, KVCache]:
        """Complete drafts int32 [b, W], of which `counts` [b] are there; the last is not used.

        start: int32 [b], slot of `rows.last`. cache: the head's layer, in which that slot is
        written, and those of the drafts that are fed.
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
        if width == 1:  # for wider steps that come later
            _, layer = self.head(state, self.model.lookup(token), start, layer)
        return jnp.concatenate([*completed, drafted[:, -1:]], axis=1), (layer,)

    def correct(self, start: Array, cache: KVCache, hidden: Array, tokens: Array) -> KVCache:
        """Put the policy's states in place of the head's own into its layer, in the slots of
        drafts. hidden: [b, W, D], in which `tokens` [b, W] were sampled."""
        if tokens.shape[1] == 1:
            return cache
        (layer,) = cache
        # Of its output nothing is used: what is computed are keys and values.
        embedded = self.model.lookup(tokens[:, :-1])
        _, layer = self.head(hidden[:, :-1], embedded, start + 1, layer)
        return (layer,)

    def _draw(self, states: Array, seeds: Array, positions: Array) -> Array:
        """Draw the tokens [b, t] at `positions` of the response from the states [b, t, D]."""
        logits = truncate(temper(self._logits(states), self.sampling), self.sampling)
        return sample(logits, seeds, reshard(positions, "batch", None), self.sampling)[0]

    def _logits(self, states: Array) -> Array:
        """Logits [b, t, V]; -inf at tokens that the head never drafts."""
        if self.vocab is None:
            return self.model.logits(states)
        config = self.model.config
        some = final_logits(head_logits(states, self.vocab["rows"]), config.replace(unused_ids=()))
        some = reshard(some, "batch", None, None)
        shape = (*states.shape[:2], config.vocab_size)
        nothing = jnp.full(shape, -jnp.inf, out_sharding=axes("batch", None, None))
        write = jax.vmap(jax.vmap(lambda row, values: row.at[self.vocab["ids"]].set(values)))
        return reshard(write(nothing, some), "batch", None, "vocab")

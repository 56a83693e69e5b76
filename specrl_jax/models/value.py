"""A value function over the tokens of a response: a linear head on a decoder's hidden states.

Parameters: {"head": float32 [D]}, and "decoder" where the critic has its own. The head starts at
zero, so that the first values are 0; the decoder starts as a copy of the policy's.
"""

import jax
import jax.numpy as jnp
from jax import Array

from specrl_jax.models.config import ModelConfig
from specrl_jax.models.lora import merge
from specrl_jax.models.transformer import Params, Transformer
from specrl_jax.sharding import axes

# Kind → whether the critic has a decoder of its own, or reads the policy's hidden states.
KINDS = {"head": False, "network": True}


def init_critic(model: ModelConfig, kind: str, params: Params) -> Params:
    """The critic's first parameters; `params` are the policy's."""
    critic = {"head": jnp.zeros(model.embed_dim, out_sharding=axes(None, stored=True))}
    if KINDS[kind]:
        own = {name: x for name, x in params.items() if name != "lm_head"}
        copied = jax.tree.map(jnp.copy, own) if model.lora is None else merge(model, own)
        critic["decoder"] = copied
    return critic


def values(critic: Params, hidden: Array) -> Array:
    """float32 [...] in units of reward, for hidden states [..., D] of the critic's decoder."""
    return jnp.einsum("...D,D->...", hidden.astype(jnp.float32), critic["head"])


def decoder(model: ModelConfig, critic: Params) -> Transformer | None:
    """The critic's own decoder, whose `logits` mean nothing; None if it reads the policy's."""
    if "decoder" not in critic:
        return None
    return Transformer(model.replace(tie_embeddings=True, lora=None), critic["decoder"])

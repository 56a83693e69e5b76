"""A decoder: tokens in, hidden states and a KV cache out. The same module for rollout and update.

Its parameters are a nested dict of arrays:

    embed [V, D] · final_norm [D] · lm_head [V, D] (untied only) · layers: {name: [L, ...]}

The update scans the stacked layers, which compiles faster, and so does prefill. Decode steps use
unstacked layers (`rollout_weights`), because a scan would add overhead to every token.
"""

import functools
import math
import zlib
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array

from specrl_jax.models import experts, lora
from specrl_jax.models.config import MAX_INT, ModelConfig
from specrl_jax.models.kv_cache import KVCache, cache_slots
from specrl_jax.models.layers import (
    LAYER_AXES,
    DecoderLayer,
    Place,
    Rope,
    join_projections,
    rms_norm,
    rope_tables,
)
from specrl_jax.models.parameters import LAYER, TOP, Params, is_float32, select
from specrl_jax.models.row_slices import gather_tokens
from specrl_jax.models.scores import softcapped
from specrl_jax.sharding import axes, mesh_axes, put_as, reshard, shards


class Ropes(NamedTuple):
    """Rotary tables of the kinds of layers."""

    of_global: Rope
    of_local: Rope | None = None  # if there are local layers

    def of(self, local: Array | bool | None, unrotated: Array | bool | None) -> Rope:
        """Return one layer's tables; arrays give its kind in a trace, None if no layer has it."""

        def pick(kind: Array | bool | None, own: Rope | None, other: Rope) -> Rope:
            if kind is None or isinstance(kind, bool):
                return own if kind else other
            return jax.tree.map(functools.partial(jnp.where, kind), own, other)

        cos, sin = self.of_global
        rope = pick(local, self.of_local, self.of_global)
        return pick(unrotated, (jnp.ones_like(cos), jnp.zeros_like(sin)), rope)


class Transformer(nnx.Module):
    """Decoder over `params`; `__call__` returns hidden states, `logits` turns them into scores."""

    def __init__(self, config: ModelConfig, params: Params):
        self.config = config
        self.embed = nnx.Param(params["embed"])
        self.final_norm = nnx.Param(params["final_norm"])
        self.lm_head = None if config.tie_embeddings else nnx.Param(params["lm_head"])
        self.layers = nnx.data(params["layers"])

    def __call__(
        self,
        tokens_BT: Array,
        start_B: Array | None = None,
        cache: KVCache | None = None,
        *,
        positions_BT: Array | None = None,
        ends_BT: Array | None = None,
        gives_cache: bool = False,
        counted_BT: Array | None = None,
        slots_BT: Array | None = None,
        routing_BTLk: Array | None = None,
        gives_routing: bool = False,
    ) -> tuple[Array, KVCache | None]:
        """Return hidden states [B, T, D] after the final norm, and the cache with T slots written.

        tokens_BT: int32 [B, T], left-aligned.
        start_B: int32 [B], slot of each row's first token, with a cache.
        cache: Keys and values of all earlier slots; layers are unstacked. None: the tokens see each
            other, layers are stacked.
        gives_cache: Return keys and values [L, B, T, K, H] in place of a cache.
        counted_BT: bool, tokens whose load of experts (`experts.Load` of all layers) to return in
            place of a cache, without `gives_cache`; None: none.
        routing_BTLk: Experts to replay, ids + 1, see `experts.route`, without a cache; None: none.
        gives_routing: Return the cache and the chosen experts, `config.routing` [B, T, L, k], as a
            pair in place of a cache.
        positions_BT: int32, rotary positions, below the number of slots; None: the tokens' slots.
        ends_BT: int32, if the rows are packed tries, without `start_B`; see `attend_packed`.
        slots_BT: int32, slots of the tokens in packed tries of S slots; slots >= S are no tokens.
            Then the cache has keys and values [B, S, K, H] of each layer, layers are unstacked,
            and positions and ends are [B, S].
        """
        rows, width = tokens_BT.shape
        place = Place(start_B, ends_BT, counted=counted_BT, slots=slots_BT, routing=routing_BTLk)
        if slots_BT is not None:
            slots = positions_BT.shape[1]
            rotary_BT = gather_tokens(positions_BT, jnp.minimum(slots_BT, slots - 1))
        else:
            if start_B is None:
                start_B = jnp.zeros(rows, jnp.int32, out_sharding=axes("batch"))
            slots_BT = start_B[:, None] + jnp.arange(width)[None, :]
            slots = width if cache is None else cache_slots(cache)
            rotary_BT = slots_BT if positions_BT is None else positions_BT
        ropes = Ropes(self._rope(rotary_BT, slots, local=False))
        if self.config.local_layers:
            ropes = ropes._replace(of_local=self._rope(rotary_BT, slots, local=True))
            place = place._replace(positions=positions_BT)
        x_BTD = self.lookup(tokens_BT)
        x_BTD, cache, ids_LBTk = self._run_layers(
            x_BTD, ropes, place, cache, gives_cache, gives_routing
        )
        if gives_routing:
            routing_LBTk = (ids_LBTk + 1).astype(self.config.routing.dtype)
            cache = (cache, jnp.moveaxis(routing_LBTk, 0, 2))
        return rms_norm(x_BTD, self.final_norm[...], self.config), cache

    def _rope(self, positions_BT: Array, slots: int, local: bool) -> Rope:
        """Return `rope_tables` of positions below `slots`, from a table if that is less work.

        XLA on CPU would recompute them for every head of every layer.
        """
        uses = positions_BT.size * self.config.num_heads * self.config.num_layers
        if uses < slots:
            return rope_tables(positions_BT, self.config, local)
        tables = rope_tables(jnp.arange(slots)[None], self.config, local)
        out = axes("batch", None, None, None)
        return tuple(
            x[0].at[positions_BT].get(out_sharding=out, mode="promise_in_bounds") for x in tables
        )

    @property
    def head(self) -> Array:
        """Return the stored head [V, D]: `lm_head`, or the embeddings if tied."""
        return (self.embed if self.lm_head is None else self.lm_head)[...]

    def logits(self, hidden: Array) -> Array:
        """Return float32 [..., V], split over "tensor", for hidden states [..., D]."""
        head_VD = compute_head(self.head, self.config.dtype)
        return final_logits(head_logits(hidden, head_VD), self.config)

    def lookup(self, tokens_BT: Array) -> Array:
        """Return embeddings [B, T, D] of tokens int32 [B, T]."""
        table_VD = reshard(self.embed[...].astype(self.config.dtype), "vocab", None)
        x_BTD = table_VD.at[tokens_BT].get(out_sharding=axes("batch", None, None))
        if self.config.embed_factor == 1.0:
            return x_BTD
        return x_BTD * jnp.asarray(self.config.embed_factor, x_BTD.dtype)

    def _run_layers(
        self,
        x_BTD: Array,
        ropes: Ropes,
        place: Place,
        cache: KVCache | None,
        gives_cache: bool,
        gives_routing: bool,
    ) -> tuple[Array, KVCache | experts.Load | None, Array | None]:
        """Run all layers; return states, cache or load, and chosen experts [L, B, T, k] or None."""
        local_L = self.config.local_layers
        unrotated_L = self.config.unrotated_layers
        window = self.config.sliding_window
        if cache is not None:
            new_cache = []
            chosen = []
            for i, (params, layer_cache) in enumerate(zip(self.layers, cache, strict=True)):
                local = bool(local_L) and local_L[i]
                rope = ropes.of(local, bool(unrotated_L) and unrotated_L[i])
                own_place = place._replace(window=window if local else None)
                block = DecoderLayer(self.config, params)
                x_BTD, layer_cache, routed = block(x_BTD, rope, own_place, layer_cache)
                new_cache.append(layer_cache)
                chosen.append(routed.ids if gives_routing else None)
            return x_BTD, tuple(new_cache), jnp.stack(chosen) if gives_routing else None

        def layer(x_BTD: Array, inputs: tuple[dict[str, Array] | Array | None, ...]):
            params, local, unrotated, routing_BTk = inputs
            rope = ropes.of(local, unrotated)
            own_place = place._replace(routing=routing_BTk)
            if local is not None:
                own_place = own_place._replace(window=jnp.where(local, window, MAX_INT))
            x_BTD, fresh, routed = DecoderLayer(self.config, params)(x_BTD, rope, own_place)
            chosen = routed.ids if gives_routing else None
            if gives_cache:
                return x_BTD, (fresh, chosen)
            return x_BTD, (None if place.counted is None else routed.load, chosen)

        if self.config.remat and not gives_cache:
            layer = jax.checkpoint(layer, prevent_cse=False)
        kinds = [jnp.array(kind) if kind else None for kind in (local_L, unrotated_L)]
        routing_LBTk = None if place.routing is None else jnp.moveaxis(place.routing, 2, 0)
        inputs = (dict(self.layers), *kinds, routing_LBTk)
        x_BTD, (fresh_or_load, chosen) = jax.lax.scan(layer, x_BTD, inputs)
        return x_BTD, fresh_or_load, chosen


def compute_head(head_VD: Array, dtype) -> Array:
    """Return the head in compute type and layout."""
    return reshard(head_VD.astype(dtype), "vocab", None)


def head_logits(hidden: Array, head_VD: Array) -> Array:
    """Return float32 [..., V], split over "tensor", for states [..., D] and `compute_head`'s."""
    out = axes("batch", *(None,) * (hidden.ndim - 2), "vocab")
    return jnp.einsum(
        "...D,VD->...V", hidden, head_VD, preferred_element_type=jnp.float32, out_sharding=out
    )


def final_logits(logits: Array, config: ModelConfig, ids: Array | None = None) -> Array:
    """Return logits [..., V] of `head_logits`, capped, with -inf at `unused_ids`.

    ids: int32, the tokens of the logits, if these are for some tokens only; None: for all.
    """
    if config.logits_divisor != 1.0:
        logits = logits / config.logits_divisor
    logits = softcapped(logits, config.final_softcap)
    if not config.unused_ids:
        return logits
    if ids is None:
        ids = reshard(jnp.arange(logits.shape[-1]), "vocab")[(None,) * (logits.ndim - 1)]
    unused = [(first <= ids) & (ids < stop) for first, stop in config.unused_ids]
    return jnp.where(functools.reduce(jnp.logical_or, unused), -jnp.inf, logits)


def param_shapes(config: ModelConfig) -> dict:
    """Return shape and type of every parameter."""

    def leaf(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.float32)

    top = {n: leaf(*p.shape(config)) for n, p in select(TOP, config).items()}
    layer = {n: leaf(config.num_layers, *p.shape(config)) for n, p in select(LAYER, config).items()}
    return top | {"layers": layer}


def param_count(config: ModelConfig) -> int:
    """Return the number of parameters."""
    return sum(x.size for x in jax.tree.leaves(param_shapes(config)))


def used_param_count(config: ModelConfig) -> int:
    """Return the number of parameters used per token: of experts, only the chosen ones."""
    layer = select(LAYER, config).values()
    per_expert = sum(math.prod(p.shape(config)) for p in layer if p.per_expert)
    unused = config.num_experts - config.experts_per_token
    idle = config.num_layers * per_expert * unused // max(config.num_experts, 1)
    return param_count(config) - idle


def abstract_params(config: ModelConfig) -> dict:
    """Return shape, type and stored layout of every parameter on the mesh in use."""
    return jax.eval_shape(lambda: init_params(config, jax.random.key(0)))


def abstract_trained(config: ModelConfig) -> dict:
    """Return `abstract_params` of what is trained: adapters, if there are any."""
    return lora.abstract_adapters(config) if config.lora else abstract_params(config)


def param_specs(config: ModelConfig) -> dict:
    """Return the partition of every parameter as stored (master weights, optimizer state)."""
    shapes = param_shapes(config)
    layers = {n: axes(None, *LAYER[n].layout, stored=True) for n in shapes["layers"]}
    top = {n: axes(*TOP[n].layout, stored=True) for n in shapes if n != "layers"}
    return top | {"layers": layers}


def check_mesh(config: ModelConfig) -> None:
    """Raise a one-line ValueError for a size that the mesh in use cannot split evenly."""
    for field, axis in (
        ("num_heads", "heads"),
        ("num_kv_heads", "kv_heads"),
        ("mlp_dim", "mlp"),
        ("embed_dim", "embed"),
        ("vocab_size", "vocab"),
    ):
        size = getattr(config, field)
        pieces = shards(axis, stored=True)
        if size % pieces:
            names = " x ".join(f"mesh.{name}" for name in mesh_axes(axis, stored=True))
            raise ValueError(
                f"model.{field} must be divisible by {names} = {pieces}, got {size}; "
                "choose another mesh"
            )


def init_params(config: ModelConfig, key: Array) -> Params:
    """Return random float32 parameters: normal with std fan_in^-1/2, norms multiply by 1, biases 0.

    The outputs into the residual stream are scaled by (2 L)^-1/2.
    """
    depth = (2 * config.num_layers) ** -0.5

    def init(path, parameter: jax.ShapeDtypeStruct) -> Array:
        name = path[-1].key
        shape = parameter.shape
        if name.endswith("norm"):
            return jnp.zeros(shape) if config.norm_adds_one else jnp.ones(shape)
        if name.endswith("bias"):
            return jnp.zeros(shape)
        std = (TOP | LAYER)[name].fan_in(config) ** -0.5
        std = std * depth if name in ("o_proj", "down_proj", "expert_down") else std
        noise_key = jax.random.fold_in(key, zlib.crc32(jax.tree_util.keystr(path).encode()))
        return std * jax.random.normal(noise_key, shape)

    def build() -> Params:
        params = jax.tree_util.tree_map_with_path(init, param_shapes(config))
        return jax.tree.map(jax.sharding.reshard, params, param_specs(config))

    return jax.jit(build)()


def place_params(config: ModelConfig, params: dict) -> Params:
    """Place host weights in the stored layout of the mesh in use."""
    return jax.tree.map(put_as, params, param_specs(config))


def rollout_weights(config: ModelConfig, params: Params) -> Params:
    """Return the weights for one rollout: a copy for decode steps, and as `stacked` the original
    layers for prefill."""
    return copy_weights(config, params) | {"stacked": params["layers"]}


@functools.partial(jax.jit, static_argnums=0)
def copy_weights(config: ModelConfig, params: Params) -> Params:
    """Copy weights: cast to the compute type, except for `is_float32`, gathered over "fsdp", layers
    unstacked, projections joined. Adapters stay separate from their weights, as in the update: in
    bfloat16 a sum of both would lose what they have learned."""
    convert = functools.partial(convert_weight, config)
    weights = {n: convert(n, x, TOP[n].layout) for n, x in params.items() if n != "layers"}
    stacked = params["layers"]
    weights["layers"] = tuple(
        join_projections({n: convert(n, x[i], LAYER_AXES[n]) for n, x in stacked.items()})
        for i in range(config.num_layers)
    )
    return weights


def convert_weight(config: ModelConfig, name: str, x: Array, dims: tuple[str | None, ...]) -> Array:
    """Copy a weight of the rollout in the update's compute type, with these axes."""
    dtype = x.dtype if is_float32(name) else config.dtype
    # Always a copy: the update donates the originals.
    return reshard(jnp.copy(x).astype(dtype), *dims)


# A critic: a linear head on a decoder's hidden states, for each token of a response. Parameters:
# {"head": float32 [D]}, and "decoder" if it has its own. The head starts at zero, so the first
# values are 0; the decoder starts as a copy of the policy's.

# Kind → whether the critic has its own decoder, or reads the policy's hidden states.
CRITIC_KINDS = {"head": False, "network": True}


def init_critic(model: ModelConfig, kind: str, params: Params) -> Params:
    """Return the critic's first parameters; `params` are the policy's."""
    critic = {"head": jnp.zeros(model.embed_dim, out_sharding=axes(None, stored=True))}
    if CRITIC_KINDS[kind]:
        own = {name: x for name, x in params.items() if name != "lm_head"}
        copied = jax.tree.map(jnp.copy, own) if model.lora is None else lora.merge(model, own)
        critic["decoder"] = copied
    return critic


def token_values(critic: Params, hidden: Array) -> Array:
    """Return float32 [...] in units of reward, for states [..., D] of the critic's decoder."""
    return jnp.einsum("...D,D->...", hidden.astype(jnp.float32), critic["head"])


def critic_decoder(model: ModelConfig, critic: Params) -> Transformer | None:
    """Return the critic's own decoder, without a head; None if it reads the policy's states."""
    if "decoder" not in critic:
        return None
    return Transformer(model.replace(tie_embeddings=True, lora=None), critic["decoder"])

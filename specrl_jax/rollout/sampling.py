"""Keyed noise, truncated distributions, and sampling a token.

Noise is a pure function of (run key, purpose, step, prompt id, sample, position[, candidate]): a
token does not depend on batch composition, row order, program shape or restarts. Row seeds come
from JAX's own threefry; a candidate's noise is a counter hash of the row seed, far cheaper than
threefry.

A token is sampled as the winner of an exponential race, argmax p(x) / E(x) with E(x) ~ Exp(1): the
same distribution as Gumbel-max with one logarithm less, and as robust to rounding (a sample flips
only if two candidates tie within the rounding error, unlike the inverse CDF). Long vocabularies
race twice: folded to [C, N], with token c·N + n at (c, n), first the N columns race by mass, then
the C tokens of the winning column. It is the same distribution, with noise for N + C candidates
instead of V.
"""

import dataclasses
import enum
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from specrl_jax.models.head import folded_rows
from specrl_jax.models.logprobs import own_ids, pick, scores_at
from specrl_jax.sharding import COMPUTE, axes, reshard, shards
from specrl_jax.types import Tokens


class Purpose(enum.IntEnum):
    """Purpose of noise: the uniform that rejects a token must not sample its successor."""

    ACCEPT = 0
    SAMPLE = 1
    EVALUATE = 2


@dataclasses.dataclass(frozen=True)
class NoiseKey:
    """Key of a rollout's noise, in addition to prompt, sample and position."""

    key: Array  # the run's
    step: int  # also the rollout's step, recorded in `origin_steps` of its new tokens
    purpose: Purpose = Purpose.SAMPLE
    # int [Q, G], the step whose noise each row uses; None: `step` everywhere
    noise_steps: np.ndarray | None = None

    def steps_of(self, groups: int, group_size: int) -> np.ndarray:
        """Return the step whose noise each row uses, int [Q, G]."""
        if self.noise_steps is None:
            return np.full((groups, group_size), self.step)
        return self.noise_steps


@dataclasses.dataclass(frozen=True)
class SamplingConfig:
    """Temperature (0: greedy), then top-k (0: off), then top-p (1: off)."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0

    @property
    def truncates(self) -> bool:
        return self.top_k > 0 or self.top_p < 1.0

    def at(self, temperature: float) -> "SamplingConfig":
        """Return the same at another temperature; greedy sampling does not truncate."""
        return SamplingConfig(temperature, self.top_k, self.top_p) if temperature else _GREEDY


_GREEDY = SamplingConfig(0.0)


def row_seeds(key: Array, purpose: int, step: Array, ids: Array, samples: Array) -> Array:
    """Return uint32 [B, 2] seeds of the rows; ids: uint32 [B, 2] prompt ids, samples: int32 [B].

    step: a scalar, or [B] where rows belong to different steps.
    """
    key = jax.random.fold_in(key, purpose)
    steps = reshard(jnp.broadcast_to(step, samples.shape), "batch")

    def seed(step: Array, high: Array, low: Array, sample: Array) -> Array:
        row = jax.random.fold_in(jax.random.fold_in(jax.random.fold_in(key, step), high), low)
        return jax.random.key_data(jax.random.fold_in(row, sample))[-2:]

    # A slice of a single row forgets that its axis is the batch.
    high = reshard(ids[:, 0], "batch")
    low = reshard(ids[:, 1], "batch")
    return jax.vmap(seed)(steps, high, low, samples)


def uniforms(seeds_B2: Array, positions: Array) -> Array:
    """Return float32 in (0, 1] for positions [B, ...], each a function of (row seed, position)."""
    seeds = seeds_B2.reshape(seeds_B2.shape[0], 2, *(1,) * (positions.ndim - 1))
    return to_unit(_hash(positions.astype(jnp.uint32), seeds[:, 0], seeds[:, 1]))


def exponentials(seeds_B2: Array, positions: Array, ids: Array) -> Array:
    """Return float32 Exp(1) [B, ..., n], each a function of (row seed, position [B, ...], id).

    ids: integers [B or 1, ..., n].
    """
    first, second = noise_keys(seeds_B2, positions)
    return exponential(ids, first[..., None], second[..., None])


def noise_keys(seeds_B2: Array, positions: Array) -> tuple[Array, Array]:
    """Return two uint32 [B, ...] that key the noise of the candidates at positions [B, ...]."""
    position = positions.astype(jnp.uint32)
    shape = (-1, *(1,) * (positions.ndim - 1))
    seed = reshard(seeds_B2[:, 0], "batch").reshape(shape)
    seed2 = reshard(seeds_B2[:, 1], "batch").reshape(shape)
    first = _hash(position, seed, seed2)
    second = _hash(position ^ jnp.uint32(0x5BD1E995), seed2, seed)
    return first, second


def exponential(ids: Array, first: Array, second: Array) -> Array:
    """Return float32 Exp(1) for candidates; ids: integers that broadcast against `noise_keys`."""
    bits = _hash(ids.astype(jnp.uint32), first, second)
    # Small values win the race, so they need the resolution: floats are dense near 0, and
    # -log1p(-u) keeps it where -log(u) would see only 2^24 values near u = 1.
    # u stays below 1, where the time is infinite and a token with all the mass would lose.
    return -jnp.log1p(-jnp.minimum(to_unit(bits), 1 - 2.0**-24))


def _hash(x: Array, seed: Array, seed2: Array) -> Array:
    """Mix a counter with two seeds, 32 bits (two rounds of the murmur3 finaliser)."""
    x = (x * jnp.uint32(0x9E3779B9)) ^ seed
    for constant, shift, salt in ((0x85EBCA6B, 16, seed2), (0xC2B2AE35, 13, seed)):
        x = (x ^ (x >> shift)) * jnp.uint32(constant)
        x = (x ^ (x >> 15)) * jnp.uint32(0x7FEB352D) + salt
    return x ^ (x >> 16)


def to_unit(bits: Array) -> Array:
    """uint32 → float32 in (0, 1]: (bits + 1/2) / 2^32, never 0."""
    return (bits.astype(jnp.float32) + 0.5) * jnp.float32(2.0**-32)


def truncate(logits: Array, config: SamplingConfig) -> Array:
    """Return logits [..., V] with the tokens outside top-k and top-p at -inf.

    Thresholds are found by bisection over the ordered bit patterns of float32: exact, without a
    sort, using only reductions over the vocabulary. Ties at a threshold are kept together.
    """
    if 0 < config.top_k < logits.shape[-1]:
        logits = _keep_above(logits, lambda above: jnp.sum(above, axis=-1), config.top_k)
    if config.top_p < 1.0:
        probs = jax.nn.softmax(logits, axis=-1)
        mass = lambda above: jnp.sum(jnp.where(above, probs, 0.0), axis=-1)  # noqa: E731
        logits = _keep_above(logits, mass, config.top_p)
    return logits


def _keep_above(logits: Array, total, target: float) -> Array:
    """Keep the highest scores, as few as needed for total(kept) >= target."""
    bits = jax.lax.bitcast_convert_type(logits, jnp.uint32)
    ranks = jnp.where(bits >> 31 == 1, ~bits, bits | jnp.uint32(1 << 31))  # ordered as the scores
    low = jnp.zeros_like(jnp.max(ranks, axis=-1))  # keeps everything, which reaches the target

    def halve(bit: Array, low: Array) -> Array:
        middle = low | (jnp.uint32(1) << (31 - bit).astype(jnp.uint32))
        return jnp.where(total(ranks >= middle[..., None]) >= target, middle, low)

    threshold = jax.lax.fori_loop(0, 32, halve, low)
    return jnp.where(ranks >= threshold[..., None], logits, -jnp.inf)


def sample(
    logits: Array, seeds_B2: Array, positions: Array, config: SamplingConfig
) -> tuple[Array, Array, Array]:
    """Sample token ids [B, ...] from softmax(logits [B, ..., V]), tempered and truncated; greedy at
    T = 0.

    Returns the tokens, their log-probs [B, ...], and log Σ exp(logits).
    positions: int32 [B, ...], of the sampled tokens in their responses.
    """
    if config.temperature == 0:
        tokens = jnp.argmax(logits, axis=-1).astype(jnp.int32)
        log_z = jax.nn.logsumexp(logits, axis=-1)
        return tokens, pick(logits, tokens) - log_z, log_z
    noise = functools.partial(exponentials, seeds_B2, positions)
    leading = (None,) * positions.ndim
    # Keep this apart: XLA's CPU backend would share the exponentials with a log-sum-exp at the
    # price of a slow fusion; whole steps of 27M parameters took 14 % longer.
    folded = jax.lax.optimization_barrier(_fold(logits))
    rows, length = folded.shape[-2:]
    row_ids = jnp.arange(rows, dtype=jnp.int32)
    if rows % shards("vocab") == 0:  # laid out like the folded rows
        row_ids = reshard(row_ids, "vocab")
    row_ids = row_ids[leading]
    if length == 1:
        # A single column always wins. Skip its race: sums next to an axis of one are ten times
        # slower.
        won = jnp.zeros_like(positions)
        top = jnp.max(folded[..., 0], axis=-1, keepdims=True)
        inside = folded[..., 0] - top
        log_mass = jnp.log(jnp.sum(jnp.exp(inside), axis=-1))
    else:
        top = jnp.max(folded, axis=(-2, -1), keepdims=True)
        # Apart from the race: if fused, the exponentials would be computed one by one.
        masses = jax.lax.optimization_barrier(jnp.sum(jnp.exp(folded - top), axis=-2))
        columns = rows * length + jnp.arange(length)  # ids that no token has
        won = jnp.argmax(masses / noise(columns[leading]), axis=-1)
        index = jnp.broadcast_to(won[..., None, None], (*folded.shape[:-1], 1))
        index = jax.sharding.reshard(index, jax.typeof(folded).sharding.spec)
        top = top[..., 0]
        inside = jnp.take_along_axis(folded, index, axis=-1)[..., 0] - top
        log_mass = jnp.log(jnp.sum(masses, axis=-1))
    ids = row_ids * length + won[..., None]
    row = jnp.argmax(jnp.exp(inside) / noise(ids), axis=-1)
    ahead = jnp.sum(jnp.where(row_ids == row[..., None], inside, 0.0), axis=-1)
    return (row * length + won).astype(jnp.int32), ahead - log_mass, top[..., 0] + log_mass


def _fold(scores: Array) -> Array:
    """Fold [..., V] → [..., C, N], the same on every mesh. C is split like the vocabulary, so work
    along N stays on a device; if the mesh does not divide C, the scores are gathered first."""
    vocab = scores.shape[-1]
    rows = folded_rows(vocab)
    dims = jax.typeof(scores).sharding.spec[:-1]
    split = axes("vocab")[0] if rows > 1 and rows % shards("vocab") == 0 else None
    if split is None:
        scores = jax.sharding.reshard(scores, jax.P(*dims, None))
    shape = (*scores.shape[:-1], rows, vocab // rows)
    return jnp.reshape(scores, shape, out_sharding=jax.P(*dims, split, None))


def temper(logits: Array, config: SamplingConfig) -> Array:
    """Divide logits by the temperature (unchanged for greedy decoding)."""
    return logits / config.temperature if config.temperature > 0 else logits


@dataclasses.dataclass(frozen=True)
class TokenDistributions:
    """Distributions of the policy at positions of rows: samples and scores tokens."""

    logits: Array  # [B, ..., V], tempered
    truncated: Array  # [B, ..., V], also by top-k and top-p: sampled from
    seeds: Array  # uint32 [B, 2]
    positions: Array  # int32 [B, ...], of the tokens in their responses
    config: SamplingConfig
    top_ids: Array | None  # int32 [B, ..., k], the likeliest tokens; None: they are not kept

    @classmethod
    def of(
        cls, logits: Array, seeds: Array, positions: Array, config: SamplingConfig, k: int = 0
    ) -> "TokenDistributions":
        """Take the policy's logits [B, ..., V]; k: likeliest tokens to keep; others as the fields.

        With k >= top-k, the kept tokens are all that can be sampled.
        """
        logits = temper(logits, config)
        cut = truncate(logits, config)
        top_ids = likeliest_tokens(cut, k) if k else None
        if 0 < config.top_k <= k:
            # If tokens tie for the last place, the first ones.
            allowed = top_ids[..., : config.top_k]
            nothing = jnp.zeros_like(allowed, cut.dtype)
            cut = add_at(cut, allowed, nothing, elsewhere=nothing[..., 0] - jnp.inf)
        return cls(logits, cut, seeds, positions, config, top_ids)

    def sample(self, weigh: Callable[[Array], Array] | None = None) -> Tokens:
        """Sample a token from each distribution.

        weigh: maps the truncated scores to log-weights [B, ..., V] to sample from instead; None:
        use the scores.
        """
        if weigh is None:
            tokens, logprobs, log_z = sample(
                self.truncated, self.seeds, self.positions, self.config
            )
            return self._kept(tokens, logprobs, log_z[..., None])
        tokens, _, _ = sample(weigh(self.truncated), self.seeds, self.positions, self.config)
        return self.score(tokens)

    def score(self, tokens: Array) -> Tokens:
        """Look up the log-probs of tokens int32 [B, ...]."""
        return self._kept(tokens, logprobs_at(self.truncated, tokens[..., None])[..., 0], None)

    def _kept(self, tokens: Array, sampling: Array, log_z: Array | None) -> Tokens:
        policy = sampling
        if self.config.truncates:
            # By lookup: on a CPU a mask over the vocabulary would cost as much as log-sum-exp does.
            policy = logprobs_at(self.logits, tokens[..., None])[..., 0]
        if self.top_ids is None:
            return Tokens(tokens, policy, sampling)
        top_logprobs = logprobs_at(self.truncated, self.top_ids, log_z)
        return Tokens(tokens, policy, sampling, top_ids=self.top_ids, top_logprobs=top_logprobs)


# Single tokens of a distribution over a split vocabulary -----------------------------------------


def logprobs_at(scores: Array, ids: Array, log_z: Array | None = None) -> Array:
    """log softmax(scores [..., V]) at ids [..., k], float32 nats; -inf where an id is -1.

    log_z: [..., 1], log Σ exp(scores), if known.
    """
    if log_z is None:
        log_z = jax.nn.logsumexp(scores, axis=-1, keepdims=True)
    return jnp.where(ids >= 0, scores_at(scores, ids) - log_z, -jnp.inf)


def likeliest_tokens(scores: Array, k: int) -> Array:
    """Return the k tokens with the highest scores [..., V], int32 [..., k], highest first.

    -1 if V < k; the first of ties. On a split vocabulary each shard finds its own k first, so the
    scores are never gathered.
    """
    inner = (None,) * (scores.ndim - 2)

    @functools.partial(jax.shard_map, out_specs=axes("batch", *inner, "vocab"))
    def take_own(scores: Array) -> tuple[Array, Array]:
        size = scores.shape[-1]
        values, ids = jax.lax.top_k(scores, min(k, size))
        return values, ids + size * jax.lax.axis_index(COMPUTE["vocab"])

    values, ids = take_own(reshard(scores, "batch", *inner, "vocab"))
    values = reshard(values, "batch", *inner, None)
    ids = reshard(ids, "batch", *inner, None)
    _, order = jax.lax.top_k(values, min(k, values.shape[-1]))
    ids = jnp.take_along_axis(ids, order, axis=-1)
    pad = ((0, 0),) * (scores.ndim - 1) + ((0, k - ids.shape[-1]),)
    return jnp.pad(ids, pad, constant_values=-1)


def add_at(scores: Array, ids: Array, values: Array, elsewhere: Array) -> Array:
    """scores [..., V] + values [..., k] at ids, + elsewhere [...] at all other tokens."""
    inner = (None,) * (scores.ndim - 2)

    @functools.partial(jax.shard_map, out_specs=axes("batch", *inner, "vocab"))
    def add(scores: Array, ids: Array, values: Array, elsewhere: Array) -> Array:
        local, here = own_ids(scores.shape[-1], ids)
        change = jnp.broadcast_to(elsewhere[..., None], scores.shape)
        local = jnp.where(here, local, scores.shape[-1])  # dropped
        return scores + jnp.put_along_axis(
            change, local, values, axis=-1, mode="drop", inplace=False
        )

    return add(
        reshard(scores, "batch", *inner, "vocab"),
        reshard(ids, "batch", *inner, None),
        reshard(values, "batch", *inner, None),
        reshard(elsewhere, "batch", *inner),
    )

"""INTERIM (lead): simple votes; the drafting helper replaces this file with the final one, same API."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import Array

from specrl_jax.sharding import reshard, spec

BEGIN, EMPTY = -1, -2


@dataclasses.dataclass(frozen=True)
class TreeLaw:
    depth: int
    factor: float
    offset: float
    min_prob: float


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Corpus:
    tokens: Array
    weights: Array


@functools.partial(jax.jit, static_argnames=("live", "depth"))
def build(stored_tokens, stored_lens, weights, *, live: int, depth: int) -> Corpus:
    prompts, _, slots = stored_tokens.shape
    inside = jnp.arange(slots)[None, None, :] < stored_lens[:, :, None]
    stored = jnp.where(inside, stored_tokens, EMPTY)
    tokens = jnp.concatenate([stored, jnp.full((prompts, live, slots), EMPTY, jnp.int32)], axis=1)
    tokens = jnp.pad(tokens, ((0, 0), (0, 0), (depth, 0)), constant_values=BEGIN)
    tokens = jnp.pad(tokens, ((0, 0), (0, 0), (0, 1)), constant_values=EMPTY)
    return Corpus(tokens, jnp.concatenate([weights, jnp.ones(live)]))


def record(corpus: Corpus, prompts, sources, starts, tokens, counts) -> Corpus:
    depth = 0
    prompts, sources, starts, counts = (reshard(x, None) for x in (prompts, sources, starts, counts))
    tokens = reshard(tokens, None, None)
    steps = jnp.arange(tokens.shape[1])[None, :]
    dump = corpus.tokens.shape[2] - 1
    depth = _depth(corpus)
    columns = jnp.where(steps < counts[:, None], depth + starts[:, None] + steps, dump)
    new = corpus.tokens.at[prompts[:, None], sources[:, None], columns].set(tokens)
    return dataclasses.replace(corpus, tokens=new.at[:, :, dump].set(EMPTY))


_DEPTH = 16


def _depth(corpus: Corpus) -> int:
    return _DEPTH


def propose(corpus: Corpus, prompts, sources, lens, width: int, law: TreeLaw):
    D = law.depth
    src = corpus.tokens.at[prompts].get(out_sharding=spec("batch", None, None))
    src = jnp.pad(src[:, :, :-1], ((0, 0), (0, 0), (0, width + 1)), constant_values=EMPTY)
    R = corpus.tokens.shape[2] - 1 - D

    def last(s, i, n):
        return jax.lax.dynamic_slice(s[i], (n,), (D,))

    own = jax.vmap(last)(src, sources, lens)[:, ::-1]
    run = jnp.ones((*src.shape[:2], R + 1), bool)
    L = jnp.zeros(run.shape, jnp.int32)
    for t in range(D):
        run &= src[:, :, D - 1 - t : D - t + R] == own[:, t][:, None, None]
        L += run
    L = jnp.where(src[:, :, D : D + R + 1] >= 0, L, 0)
    j = R - jnp.argmax(L[:, :, ::-1], axis=2)
    l = jnp.max(L, axis=2)

    def cont(s, j):
        return jax.lax.dynamic_slice(s, (D + j,), (width,))

    c = jax.vmap(jax.vmap(cont))(src, j)
    w = corpus.weights[None, :] * jnp.ones_like(l, dtype=jnp.float32)
    agree = jnp.cumprod(((c[:, :, None] == c[:, None]) & (c[:, :, None] >= 0)).astype(jnp.float32), 3)
    best_p = jnp.zeros_like(c, dtype=jnp.float32)
    best = jnp.full_like(l, -1.0, dtype=jnp.float32)
    for m in range(1, D + 1):
        ww = jnp.where(l >= m, w, 0)
        p = jnp.einsum("bapw,bp->baw", agree, ww) / jnp.maximum(ww.sum(1), 1e-9)[:, None, None]
        b = min(width, int(law.factor * m + law.offset + 1e-6))
        ok = (jnp.arange(width) < b)[None, None] & (p >= law.min_prob) & (l >= m)[:, :, None]
        p = jnp.where(ok, p, 0)
        s = p.sum(2)
        up = s >= best
        best_p, best = jnp.where(up[:, :, None], p, best_p), jnp.where(up, s, best)
    a = jnp.argmax(best, 1)
    pick = jax.vmap(lambda x, i: x[i])
    pa, ca = pick(best_p, a), pick(c, a)
    n = jnp.sum(jnp.cumprod((pa > 0).astype(jnp.int32), 1), 1)
    return jnp.where(ca >= 0, ca, 0), n

"""Slow, plain truths that the rollout tests compare with, and the tiny policies they run on.

`Reference` recomputes the whole sequence without a cache for every token and loops in Python; it
shares only the noise and `truncate` with the package, which test_sampling.py proves. `emitted`
enumerates every response of a policy whose next token depends on the last one alone.
"""

import collections
import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import special, stats

from specrl_jax.models import transformer
from specrl_jax.models.config import ModelConfig
from specrl_jax.rollout import sampling
from specrl_jax.rollout.acceptance import ACCEPTANCE_RULES, Ratio
from specrl_jax.rollout.drafts.sources import SuffixDrafts
from specrl_jax.rollout.drafts.suffix_match import SuffixDraftConfig
from specrl_jax.rollout.engine.all_rows import RowStarts, init_rows
from specrl_jax.rollout.generate import generate
from specrl_jax.rollout.requests import Requests
from specrl_jax.rollout.sampling import NoiseKey, Purpose, SamplingConfig
from specrl_jax.rollout.spec import RolloutSpec
from specrl_jax.sharding import put
from specrl_jax.types import Drafts, Example, Prompts, Source, Tokens

KEY = 11
MODEL = ModelConfig(
    vocab_size=16, embed_dim=16, mlp_dim=32, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=4,
    qk_norm=True,
)  # fmt: skip
ONE_LAYER = MODEL.replace(num_layers=1)
TREE = SuffixDrafts(SuffixDraftConfig(depth=16, factor=1.0, offset=1.0, min_prob=0.1))
to_weights = jax.jit(transformer.rollout_weights, static_argnums=0)


@functools.cache
def host_params(model: ModelConfig, nudge: float):
    """Host weights; `nudge` moves them, as an update would. Logits have a std near 1.5."""
    rng, change = np.random.default_rng(0), np.random.default_rng(99)

    def init(path, parameter):
        name, shape = path[-1].key, parameter.shape
        std = 0.4 if name == "embed" else 0.35
        base = np.ones(shape) if name.endswith("norm") else rng.normal(0, std, shape)
        return (base + change.normal(0, nudge * std, shape)).astype(np.float32)

    return jax.tree_util.tree_map_with_path(init, transformer.param_shapes(model))


def by_slot(cache) -> list[np.ndarray]:
    """Keys and values of all layers on the host, [B, S, K, H] each."""
    layers = [(np.moveaxis(keys, 3, 1), np.moveaxis(values, 2, 1)) for keys, values in host(cache)]
    return [x for layer in layers for x in layer]


def policy(nudge: float = 0.0, model: ModelConfig = MODEL):
    """(parameters, rollout weights) on the mesh in use."""
    params = transformer.place_params(model, host_params(model, nudge))
    return params, to_weights(model, params)


def table_policy(table_XV: np.ndarray):
    """A model whose next token has distribution table[last token], whatever came before.

    Attention and MLP write nothing; the final hidden state is the last token's one-hot row times
    sqrt(D), up to the norm's epsilon. Returns (model, parameters, rollout weights).
    """
    vocab = len(table_XV)
    width = max(vocab, 4)
    model = ModelConfig(
        vocab_size=vocab, embed_dim=width, mlp_dim=2, num_layers=1, num_heads=1, num_kv_heads=1,
        head_dim=2, tie_embeddings=False,
    )  # fmt: skip
    params = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), transformer.param_shapes(model))
    params["final_norm"][:] = 1.0
    params["embed"][:, :vocab] = np.eye(vocab)
    params["lm_head"][:, :vocab] = np.log(table_XV).T / math.sqrt(width)
    params = transformer.place_params(model, params)
    return model, params, to_weights(model, params)


def counting_policy(cycle: int = 16):
    """(model, rollout weights) of one that counts: after token x comes (x + 1) % cycle."""
    table = np.full((16, 16), 1e-12)
    table[np.arange(16), (np.arange(16) + 1) % cycle] = 1.0
    model, _, weights = table_policy(table)
    return model, weights


def make_prompts(token_rows, slots: int, ids=None, pad: int = 0) -> Prompts:
    """Prompts from lists of tokens; the q-th has the id words (q, 7 q + 1) unless given."""
    count = len(token_rows)
    tokens = np.full((count, slots), pad, np.int32)
    for row, values in zip(tokens, token_rows, strict=True):
        row[: len(values)] = values
    lens = np.array([len(values) for values in token_rows], np.int32)
    if ids is None:
        ids = np.stack([np.arange(count), 7 * np.arange(count) + 1], axis=1)
    ids = np.asarray(ids, np.uint32)
    examples = tuple(Example(f"{a:08x}{b:08x}", "", "", "", {}) for a, b in ids)
    return Prompts(tokens, lens, ids, examples)


def random_prompts(count: int = 8, slots: int = 6) -> Prompts:
    """Prompts of MODEL's tokens whose lengths run from 1 to all slots."""
    rng = np.random.default_rng(3)
    lens = [1, slots, *rng.integers(1, slots + 1, count - 2)]
    return make_prompts([rng.integers(5, MODEL.vocab_size, n) for n in lens], slots)


_PLAIN = SamplingConfig()


def make_spec(model=MODEL, *, sampling=_PLAIN, slots=8, prompt_slots=6, group=4, accept="ratio",
              eos=(1, 2, 3, 4), row_buckets=2, max_rows=0, tree=None,
              stored_logprobs=0, **kwargs) -> RolloutSpec:  # fmt: skip
    return RolloutSpec(
        model, sampling, ACCEPTANCE_RULES[accept].of(1.0), eos, 0, prompt_slots, slots, group,
        draft_source=tree, stored_logprobs=stored_logprobs, row_buckets=row_buckets,
        max_rows=max_rows, **kwargs,
    )  # fmt: skip


SAMPLING = SamplingConfig(0.7, top_k=5, top_p=0.9)  # likely tokens: drafts are often right
ONE_BUCKET = {"row_buckets": 1}
BUCKETS = [
    pytest.param(ONE_BUCKET, id="one", marks=pytest.mark.slow),
    pytest.param({"row_buckets": 3, "max_rows": 8}, id="a queue"),
]


def match_spec(width=1, **kwargs) -> RolloutSpec:
    """One layer and the match rule unless said; tree drafts where steps may be wider than 1."""
    tree = TREE if width > 1 else None
    kwargs = {"sampling": SAMPLING, "accept": "match", "max_width": width, "tree": tree} | kwargs
    return make_spec(ONE_LAYER, **kwargs)


def rollout(
    spec, weights, prompts, *, key=None, step=0, purpose=Purpose.SAMPLE, drafts=None,
    log_lenience=0.0, history=None, speculation=None, **others,
):  # fmt: skip
    """`generate` with all of its requests by name."""
    key = jax.random.key(KEY) if key is None else key
    noise = NoiseKey(key, step, purpose)
    requests = Requests(prompts, noise, drafts, history, **others)
    return generate(with_lenience(spec, log_lenience), weights, requests, speculation)


def with_lenience(spec, log_lenience):
    """The spec whose rule has this lenience, where it has any."""
    if not isinstance(spec.accept, Ratio):
        return spec
    return dataclasses.replace(spec, accept=Ratio(np.float32(log_lenience)))


def start(spec, prompts, noise, **requested):
    """All rows of a rollout, before any has started."""
    starts = RowStarts.of(spec, Requests(prompts, noise, **requested))
    return init_rows(spec, int(noise.purpose), noise.key, starts)


def run(spec, weights, prompts, step=0, **options):
    """(rollout, stats) under the tests' key."""
    result = rollout(spec, weights, prompts, step=step, **options)
    return result.rollout, result.stats


def history_of(spec, tokens_BR, lens_B):
    """History that a draft source reads where these are stored, each group's for its prompt."""
    slots = spec.response_slots
    tokens = np.asarray(tokens_BR, np.int32)[:, :slots].reshape(-1, 1, spec.group_size, slots)
    lens = np.asarray(lens_B, np.int32).reshape(-1, 1, spec.group_size)
    return put(tokens, *(None,) * 4), put(lens, *(None,) * 3)


def put_rows(tree):
    """Host arrays [B, ...] → device arrays split over the batch."""
    return jax.tree.map(lambda x: put(x, "batch", *(None,) * (x.ndim - 1)), tree)


def host(tree):
    """The same pytree as NumPy arrays."""
    return jax.tree.map(np.asarray, tree)


def with_tokens(rows, **changes):
    """Rows of any kind whose tokens have other columns."""
    return dataclasses.replace(rows, tokens=dataclasses.replace(rows.tokens, **changes))


def fields_of(rows) -> dict:
    """The arrays of rows of any kind, those of the tokens among them, by name."""
    fields = vars(rows.tokens) | {name: x for name, x in vars(rows).items() if name != "tokens"}
    return {name: x for name, x in fields.items() if x is not None}


def as_drafts(rollout, lens=None) -> Drafts:
    """Drafts that a store would offer after this rollout; `lens` [B] cuts it."""
    tokens = rollout.tokens.only(
        "sampling_logprobs", "origin_logprobs", "origin_steps", "top_ids", "top_logprobs"
    )
    drafts = host(Drafts(tokens, rollout.lens))
    if lens is not None:
        drafts = dataclasses.replace(drafts, lens=np.asarray(lens, np.int32))
    return put_rows(drafts)


def plain_drafts(tokens_BR, lens_B) -> Drafts:
    """Drafts of these tokens whose log-probs no rule is to read."""
    tokens, zeros = np.asarray(tokens_BR, np.int32), np.zeros(np.shape(tokens_BR), np.float32)
    lens = np.asarray(lens_B, np.int32)
    given = Tokens(
        tokens,
        sampling_logprobs=zeros,
        origin_logprobs=zeros,
        origin_steps=np.zeros_like(tokens),
    )
    return put_rows(Drafts(given, lens))


def old_drafts(spec, prompts, nudge: float) -> Drafts:
    """Responses of an earlier policy; every fifth row has none."""
    spec = dataclasses.replace(spec, draft_source=None, max_width=1, **ONE_BUCKET)
    rollout, _ = run(spec, policy(nudge, spec.model)[1], prompts)
    rows = np.arange(len(rollout.lens))
    return as_drafts(rollout, np.where(rows % 5 == 4, 0, rollout.lens))


@functools.partial(jax.jit, static_argnums=0)
def _forward(model, params, tokens_BT):
    policy = transformer.Transformer(model, params)
    return policy.logits(policy(tokens_BT)[0])


def full_logits(model, params, tokens_BT) -> np.ndarray:
    """Scores [B, T, V] of the plain forward pass: no cache, stacked layers."""
    return np.asarray(_forward(model, params, put(tokens_BT, "batch", None)))


def log_softmax(scores: np.ndarray) -> np.ndarray:
    return special.log_softmax(np.asarray(scores, np.float64), axis=-1)


def teacher_forced(model, params, prompts, tokens_BR) -> np.ndarray:
    """Log-probs [B, R] of responses, G to a prompt, under the plain forward pass; after their ends
    they are anything."""
    rows, slots = tokens_BR.shape
    group = rows // len(prompts.lens)
    columns = np.repeat(prompts.lens, group)[:, None] + np.arange(slots)
    sequences = np.zeros((rows, prompts.tokens.shape[1] + slots), np.int32)
    sequences[:, : prompts.tokens.shape[1]] = np.repeat(prompts.tokens, group, axis=0)
    np.put_along_axis(sequences, columns, tokens_BR, axis=1)
    logprobs = log_softmax(full_logits(model, params, sequences))
    return logprobs[np.arange(rows)[:, None], columns - 1, tokens_BR]


truncate = jax.jit(sampling.truncate, static_argnums=1)
sample = jax.jit(sampling.sample, static_argnums=3)
seeds_of = jax.jit(sampling.row_seeds)
uniforms = jax.jit(sampling.uniforms)

LOGPROBS = ("policy_logprobs", "sampling_logprobs", "origin_logprobs", "draft_logprobs")


class Reference:
    """One rollout, token by token. Fields are those of a `Rollout` and its tokens, in NumPy."""

    def __init__(self, spec, params, prompts, *, step, drafts=None, log_lenience=0.0,
                 purpose=Purpose.SAMPLE):  # fmt: skip
        self.spec, self.params, self.step = spec, params, step
        group, slots = spec.group_size, spec.response_slots
        self.prompt_lens = np.repeat(prompts.lens, group)
        rows = len(self.prompt_lens)
        self.sequences = np.zeros((rows, prompts.tokens.shape[1] + slots), np.int32)
        self.sequences[:, : prompts.tokens.shape[1]] = np.repeat(prompts.tokens, group, axis=0)
        self.lens = np.zeros(rows, np.int32)
        self.done = np.zeros(rows, bool)
        for name in LOGPROBS:
            setattr(self, name, np.zeros((rows, slots)))
        self.origin_steps = np.full((rows, slots), step)
        ids = put(np.repeat(prompts.ids, group, axis=0), "batch", None)
        samples = put(np.tile(np.arange(group, dtype=np.int32), len(prompts.lens)), "batch")
        self._seeds_for = lambda p: seeds_of(jax.random.key(KEY), int(p), jnp.uint32(step), ids,
                                           samples)  # fmt: skip
        if drafts is not None:
            self._verify(host(drafts), log_lenience)
        self.prefix_lens = self.lens.copy()
        self._decode(self._seeds_for(purpose))
        ends = np.arange(slots)[None, :] < self.lens[:, None]
        self.ids = np.zeros((rows, slots), np.int32)
        for row, (start, n) in enumerate(zip(self.prompt_lens, self.lens, strict=True)):
            self.ids[row, :n] = self.sequences[row, start : start + n]
        self.inside = ends

    def _distributions(self):
        """(policy, sampling) log-probs [B, T, V] and the truncated scores, of the whole rows."""
        scores = full_logits(self.spec.model, self.params, self.sequences)
        sampling = self.spec.sampling
        scores = scores / np.float32(sampling.temperature or 1.0)
        cut = np.asarray(truncate(scores, sampling))
        return log_softmax(scores), log_softmax(cut), cut

    def _verify(self, drafts, log_lenience):
        rows, slots = self.origin_steps.shape
        positions = np.broadcast_to(np.arange(slots, dtype=np.int32), (rows, slots))
        noise = np.asarray(uniforms(self._seeds_for(Purpose.ACCEPT), jnp.asarray(positions)))
        clean = self.sequences.copy()
        for row in range(rows):
            start, n = self.prompt_lens[row], drafts.lens[row]
            self.sequences[row, start : start + n] = drafts.tokens.ids[row, :n]
        policy, sampled, _ = self._distributions()
        for row in range(rows):
            start, n = self.prompt_lens[row], drafts.lens[row]
            new = [sampled[row, start + i - 1, drafts.tokens.ids[row, i]] for i in range(n)]
            old = drafts.tokens.sampling_logprobs[row]
            keep = self._num_accepted(noise[row], new, old, n, log_lenience)
            for i in range(keep):
                self.policy_logprobs[row, i] = policy[row, start + i - 1, drafts.tokens.ids[row, i]]
                self.sampling_logprobs[row, i] = new[i]
                self.draft_logprobs[row, i] = old[i]
                self.origin_logprobs[row, i] = drafts.tokens.origin_logprobs[row, i]
                self.origin_steps[row, i] = drafts.tokens.origin_steps[row, i]
            clean[row, start : start + keep] = drafts.tokens.ids[row, :keep]
            self.lens[row] = keep
            ended = keep > 0 and drafts.tokens.ids[row, keep - 1] in self.spec.eos_ids
            self.done[row] = ended or keep == slots
        self.sequences = clean

    def _num_accepted(self, noise, new, old, n, log_lenience) -> int:
        if self.spec.accept.cuts_draft:
            return min(int(noise[0] * n), max(n - 1, 0))
        for i in range(n):
            if log_lenience == -math.inf:
                return i
            if log_lenience < math.inf and noise[i] > math.exp(log_lenience + new[i] - old[i]):
                return i
        return n

    def _decode(self, seeds):
        slots, every = self.spec.response_slots, np.arange(len(self.lens))
        while not self.done.all():
            policy, sampled, cut = self._distributions()
            at = self.prompt_lens + self.lens - 1
            scores = put(cut[every, at], "batch", "vocab")
            lens = put(self.lens, "batch")
            tokens = np.asarray(sample(scores, seeds, lens, self.spec.sampling)[0])
            for row in np.flatnonzero(~self.done):
                n, token = self.lens[row], tokens[row]
                self.sequences[row, at[row] + 1] = token
                logprob = policy[row, at[row], token]
                self.policy_logprobs[row, n] = self.origin_logprobs[row, n] = logprob
                self.sampling_logprobs[row, n] = sampled[row, at[row], token]
                self.draft_logprobs[row, n] = self.sampling_logprobs[row, n]
                self.lens[row] = n + 1
                self.done[row] = token in self.spec.eos_ids or n + 1 == slots


def check_same(rollout, reference, tolerance=1e-5):
    """Every field of the rollout against the reference, tokens exactly."""
    rollout, inside = host(rollout), reference.inside
    fields = fields_of(rollout)
    for name in ("ids", "lens", "prefix_lens"):
        np.testing.assert_array_equal(fields[name], getattr(reference, name), name)
    np.testing.assert_array_equal(
        rollout.tokens.origin_steps[inside], reference.origin_steps[inside], "origin_steps"
    )
    for name in LOGPROBS:
        mine, theirs = fields[name], getattr(reference, name)
        np.testing.assert_allclose(mine, np.where(inside, theirs, 0), atol=tolerance, err_msg=name)
    prefix = np.arange(inside.shape[1])[None, :] < reference.prefix_lens[:, None]
    sources = np.where(prefix, Source.REUSED, Source.SAMPLED)
    np.testing.assert_array_equal(rollout.tokens.sources, sources, "sources")


def check_equal(rollout, other, rows=slice(None), *, but=()):
    """All fields of two rollouts; of the other only `rows`. Log-probs up to rounding."""
    inside = np.arange(rollout.tokens.ids.shape[1])[None, :] < np.asarray(rollout.lens)[:, None]
    others = fields_of(other)
    for name, mine in fields_of(rollout).items():
        if name in but:
            continue
        mine, theirs = np.asarray(mine), np.asarray(others[name])[rows]
        if mine.ndim == 3:  # after a response's end they hold anything
            mine, theirs = mine[inside], theirs[inside]
        if mine.dtype == np.float32:
            np.testing.assert_allclose(mine, theirs, atol=1e-5, err_msg=name)
        else:
            np.testing.assert_array_equal(mine, theirs, name)


def common_prefix(tokens_BR, lens_B, others_BR, other_lens_B) -> np.ndarray:
    """Leading tokens [B] that two sets of responses have in common."""
    lens = []
    for row, n, other, m in zip(tokens_BR, lens_B, others_BR, other_lens_B, strict=True):
        same = (row[: min(n, m)] == other[: min(n, m)]).tolist()
        lens.append([*same, False].index(False))
    return np.array(lens)


def responses(next_probs, slots: int, eos, prefix=()) -> dict[tuple[int, ...], float]:
    """Every response that starts with `prefix`, and its probability given that.

    next_probs: returns the next token's probabilities after a prefix.
    """
    if len(prefix) == slots or (prefix and prefix[-1] in eos):
        return {prefix: 1.0}
    probs = {}
    for token, p in enumerate(next_probs(prefix)):
        if p > 0:
            for response, rest in responses(next_probs, slots, eos, (*prefix, token)).items():
                probs[response] = p * rest
    return probs


def by_last(table, last: int):
    """`next_probs` that are table[last token]; `last` is the prompt's."""
    return lambda prefix: table[prefix[-1] if prefix else last]


def emitted(new, old, lenience: float, last: int, slots: int, eos) -> dict[tuple[int, ...], float]:
    """Probabilities of what SPEC-RL emits: a verified prefix from `old`, the rest from `new`."""
    probs = collections.defaultdict(float)
    for draft, prob in responses(by_last(old, last), slots, eos).items():
        for n, token in enumerate(draft):
            previous = draft[n - 1] if n else last
            ratio = new[previous][token] / old[previous][token]
            accept = min(1.0, lenience * ratio)
            rest = responses(by_last(new, previous), slots - n, eos)
            for suffix, p in rest.items():
                probs[draft[:n] + suffix] += prob * (1 - accept) * p
            prob *= accept
        probs[draft] += prob
    return dict(probs)


def total_variation(p: dict, q: dict) -> float:
    return 0.5 * sum(abs(p.get(k, 0.0) - q.get(k, 0.0)) for k in p.keys() | q.keys())


def p_value(counts, probs) -> float:
    """Chance of counts under a distribution; outcomes expected less than five times are pooled."""
    expected = probs * counts.sum()
    rare = expected < 5
    if rare.any():
        counts = np.append(counts[~rare], counts[rare].sum())
        expected = np.append(expected[~rare], expected[rare].sum())
    return stats.chisquare(counts, expected * counts.sum() / expected.sum()).pvalue

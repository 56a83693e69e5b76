"""One pass over the tries of prompts and drafts against a prefill and a pass over the rows."""

import dataclasses
import math

import jax
import numpy as np
import pytest
import rollout_reference as ref

from specrl_jax.models.transformer import Transformer
from specrl_jax.rollout.acceptance import ACCEPTANCE_RULES
from specrl_jax.rollout.engine import decode, decode_state
from specrl_jax.rollout.engine.decode import StopCondition
from specrl_jax.rollout.engine.draft_tries import pack_drafts
from specrl_jax.rollout.engine.rows import Noise, start_all_rows
from specrl_jax.rollout.engine.scheduler import Scheduler
from specrl_jax.sharding import shards
from specrl_jax.types import Drafts

P, R, G = 6, 8, 4
PROMPTS = ref.random_prompts()
B = G * len(PROMPTS.lens)


def spec_of(accept, **kwargs):
    stored = 3 if ACCEPTANCE_RULES[accept].needs_distribution else 0
    options = {"accept": accept, "stored_logprobs": stored, "row_buckets": 1}
    return ref.make_spec(ref.ONE_LAYER, **options | kwargs)


def shared_drafts(spec, seed=0) -> Drafts:
    """Responses of an earlier policy. Rows of a group share beginnings; some are the same, or the
    beginning of another, some are empty, some fill all slots."""
    old, _ = ref.run(spec, ref.policy(0.3, ref.ONE_LAYER)[1], PROMPTS, 1)
    drafts = {f.name: np.array(x) for f in dataclasses.fields(Drafts)
              if (x := getattr(old, f.name)) is not None}  # fmt: skip
    rng, first = np.random.default_rng(seed), np.arange(B) // G * G
    shared = rng.integers(0, R + 1, B)
    for x in drafts.values():
        if x.ndim > 1:
            columns = np.arange(R).reshape(1, R, *(1,) * (x.ndim - 2))
            same = columns < shared.reshape(B, *(1,) * (x.ndim - 1))
            x[:] = np.where(same, x[first], x)
    lens = rng.integers(1, R + 1, B)
    lens[::5], lens[1::5] = 0, R
    drafts["lens"] = lens.astype(np.int32)
    return ref.put_rows(Drafts(**drafts))


def both_ways(monkeypatch, spec, drafts, **options):
    """(rollout, stats) with the tries, then with a pass over the rows."""
    weights = ref.policy(0.0, ref.ONE_LAYER)[1]
    run = lambda: ref.run(spec, weights, PROMPTS, 1, drafts=drafts, **options)  # noqa: E731
    tries = run()
    monkeypatch.setattr(Scheduler, "_pack_drafts", lambda *args: None)
    return *tries, *run()


@pytest.mark.parametrize("shape", [pytest.param((1, 1, 1), marks=pytest.mark.slow), (2, 2, 2)])
@pytest.mark.parametrize("accept", sorted(ACCEPTANCE_RULES))
def test_a_rollout_is_the_same(make_mesh, monkeypatch, accept, shape):
    with jax.set_mesh(make_mesh(*shape)):
        spec = spec_of(accept)
        drafts = shared_drafts(spec)
        got, stats, expected, others = both_ways(monkeypatch, spec, drafts, log_lenience=0.2)
        ref.check_equal(got, expected)
        assert 0 < np.asarray(got.prefix_lens).sum() < np.asarray(drafts.lens).sum()
        assert (stats.verified_tokens, stats.accepted_tokens, stats.decode_runs) == (
            others.verified_tokens, others.accepted_tokens, others.decode_runs)  # fmt: skip
        assert {key[0] for key in stats.programs} == {"verify_trie", "decode_steps"}
        assert stats.prefill_seconds == 0
        assert others.verify_work == B * R
        (sequences, slots), *_ = (k[1:3] for k in stats.programs if k[0] == "verify_trie")
        assert stats.verify_work == sequences * slots
        assert stats.verify_work < 0.8 * (B * R + B // G * P)


def test_truncated_sampling_and_two_layers(mesh, monkeypatch):
    """A row may end before its draft does."""
    sampling = ref.sampling.SamplingConfig(temperature=0.8, top_p=0.9)
    spec = spec_of("ratio", sampling=sampling)
    max_lens = np.random.default_rng(1).integers(1, R + 1, B).astype(np.int32)
    options = {"log_lenience": 0.2, "max_lens": max_lens}
    got, stats, expected, _ = both_ways(monkeypatch, spec, shared_drafts(spec), **options)
    ref.check_equal(got, expected)
    assert stats.verify_work


def random_case(lens, seed):
    """Prompts, drafts with beginnings in common, and their lengths [n]."""
    rng = np.random.default_rng(seed)
    prompts = ref.random_prompts(max(len(lens), 2))
    prompts = ref.select(prompts, rng.integers(0, 2, len(lens)))
    tokens = rng.integers(5, 8, (len(lens), R)).astype(np.int32)
    return prompts, tokens, np.asarray(lens, np.int32)


def start(program, prompts, tokens, lens):
    noise, drafts = Noise(jax.random.key(0), step=0), ref.plain_drafts(tokens, lens)
    rows = start_all_rows(program, prompts, noise, np.zeros(len(lens), int))
    return decode_state.with_drafts(rows, drafts, program.accept, math.inf)


CASES = [[R], [0], [3], [R] * 8, [0, R, 1, 4, 4, 4, R, 0], [2, 3] * 4]


@pytest.mark.parametrize("lens", CASES, ids=str)
def test_the_pass_alone(mesh, lens):
    """Full reuse: what rows, cache and counts are does not depend on the way."""
    program = dataclasses.replace(spec_of("ratio").program, margin=R, eos_ids=(99,))
    weights, stop = ref.policy(0.0, ref.MODEL)[1], StopCondition(*map(np.int32, (-1, R, 1, 99)))
    program = dataclasses.replace(program, model=ref.MODEL)
    prompts, tokens, lens = random_case(lens, seed=len(lens))
    tries = pack_drafts(prompts.tokens, prompts.lens, tokens, lens, len(lens))
    assert len(tries.tokens) <= len(lens)
    rows = start(program, prompts, tokens, lens)
    got_cache, got, counts, progress = ref.host(
        decode.verify_trie(program, weights, tries, rows, stop, width=R)
    )
    cache = decode.broadcast_prefill(
        decode.prefill(program, weights, prompts.tokens), slots=P + R, group_size=1
    )
    rows = start(program, prompts, tokens, lens)
    cache, rows, _, other_counts, other_progress = ref.host(
        decode.decode_steps(program, weights, cache, rows, None, stop, width=R, verify=True)
    )
    if lens.any():  # else the other way takes no step
        for name in ("lens", "last", "done", "prefix_lens", "sources"):
            np.testing.assert_array_equal(getattr(got, name), getattr(rows, name), name)
        inside = np.arange(got.tokens.shape[1]) < got.lens[:, None]
        np.testing.assert_array_equal(got.tokens[inside], rows.tokens[inside])
        mine, theirs = (x.policy_logprobs[inside] for x in (got, rows))
        np.testing.assert_allclose(mine, theirs, atol=1e-5)
        assert (
            dataclasses.asdict(counts).items()
            >= {n: getattr(other_counts, n) for n in ("steps", "verified", "accepted")}.items()
        )
        np.testing.assert_array_equal(progress, other_progress)
    filled = np.arange(P + R) < (prompts.lens + np.minimum(lens, R - 1))[:, None]
    for mine, theirs in zip(ref.by_slot(got_cache), ref.by_slot(cache), strict=True):
        assert mine.shape == theirs.shape
        if lens.any():
            np.testing.assert_allclose(mine[filled], theirs[filled], atol=1e-5)
        assert not mine[np.arange(P + R) >= (prompts.lens + lens)[:, None]].any()


def test_the_model_runs_once(mesh, monkeypatch):
    calls, call = [], Transformer.__call__
    monkeypatch.setattr(
        Transformer, "__call__", lambda *args, **kw: calls.append(args[1]) or call(*args, **kw)
    )
    program = dataclasses.replace(spec_of("ratio").program, margin=R, logits_chunk=6)
    prompts, tokens, lens = random_case([R] * 8, seed=0)
    tokens[:] = tokens[0]
    tries = pack_drafts(prompts.tokens, prompts.lens, tokens, lens, len(lens))
    rows, stop = start(program, prompts, tokens, lens), StopCondition(*[np.int32(1)] * 4)
    decode.verify_trie.lower(program, ref.policy(0.0, ref.ONE_LAYER)[1], tries, rows, stop, width=R)
    assert [x.shape for x in calls] == [(1, 2 * (P + R))]  # eight rows, two prompts, one draft


@pytest.mark.parametrize("used", range(1, 13))
def test_few_numbers_of_sequences(make_mesh, used):
    """Halves of the rows and three quarters of these, as many on every shard."""
    with jax.set_mesh(make_mesh(2, 2, 1)):
        pieces = shards("batch")
        prompts = np.ones((used, P), np.int32)
        drafts = np.arange(2, 2 + used * R, dtype=np.int32).reshape(used, R)
        prompts[:, 0] = np.arange(used)
        rows = np.arange(used)
        places = rows % pieces * (16 // pieces) + rows // pieces  # the shards in turn
        lens = np.full(used, P), np.full(used, R)
        tries = pack_drafts(prompts, lens[0], drafts, lens[1], 16, places)
        assert len(tries.tokens) == -(-used // 2 // pieces) * pieces
        assert tries.nodes.shape == (16, P + R)
        assert (np.delete(tries.nodes, places, axis=0) == -1).all()
        of_shard = tries.tokens.reshape(pieces, -1)  # whose sequences the nodes count
        for row, place in enumerate(places):
            own = of_shard[place // (16 // pieces)][tries.nodes[place]]
            np.testing.assert_array_equal(own, [*prompts[row], *drafts[row]])
        # A slot that holds nothing sees itself.
        assert (tries.ends > np.arange(2 * (P + R))).all()


def test_a_pass_that_computes_no_less_is_left_out(mesh):
    """Rows that share nothing, in groups of one."""
    spec = spec_of("ratio", group=1)
    tokens = np.random.default_rng(0).integers(5, 16, (len(PROMPTS.lens), R)).astype(np.int32)
    drafts = ref.plain_drafts(tokens, np.full(len(tokens), R))
    prompts = dataclasses.replace(PROMPTS, lens=np.full_like(PROMPTS.lens, P))
    weights = ref.policy(0.0, ref.ONE_LAYER)[1]
    _, stats = ref.run(spec, weights, prompts, 1, drafts=drafts)
    assert stats.verify_work == len(tokens) * R
    assert {key[0] for key in stats.programs} >= {"prefill", "decode_steps"}

"""Episodes whose rows keep their keys against the same episodes started again at every turn."""

import sys

import jax
import numpy as np
import pytest
import rollout_reference as ref
from rollout_reference import _PLAIN, KEY, check_equal, host, make_spec

from specrl_jax.agents.turns import EpisodeRollout, turn_drafts
from specrl_jax.models.draft_head import copy_draft_head, init_draft_head
from specrl_jax.rollout.engine.runner import Stats
from specrl_jax.rollout.requests import Requests
from specrl_jax.rollout.sampling import NoiseKey, Purpose
from specrl_jax.rollout.stop_strings import StopStrings
from specrl_jax.sharding import put
from specrl_jax.types import Source

R, TURNS = 24, 4
PROMPTS = ref.random_prompts(8)
ROWS = 8 * 4
EOS = (1, 2, 3)
LONG = [5, 9, 6, 7, 8]


def answer(row: int, turn: int, tokens: list[int]) -> list[int] | None:
    """An environment without texts: tokens that depend on the turn; None: the episode is over."""
    if turn == TURNS or tokens[-1] not in EOS or (row + len(tokens)) % 7 == 0:
        return None
    return LONG[: (sum(tokens) + row) % 6]  # none at times


class Environment:
    """Answers to the rows of a rollout whose turns have ended."""

    def __init__(self):
        self.starts = np.zeros(ROWS, int)
        self.turns = np.zeros(ROWS, int)
        self.over = np.zeros(ROWS, bool)

    def answers(self, tokens, lens, ended) -> dict[int, list[int]]:
        answers = {}
        for row in np.flatnonzero(ended & ~self.over).tolist():
            self.turns[row] += 1
            own = tokens[row, self.starts[row] : lens[row]].tolist()
            ids = answer(row, self.turns[row], own)
            if ids is None or lens[row] + len(ids) >= R:
                self.over[row] = True
                continue
            answers[row] = ids
            self.starts[row] = lens[row] + len(ids)
        return answers


def play(spec, weights, share=0.0, step=1, log_lenience=0.0, **inputs):
    """(rollout, draft lengths, stats, turns) of rows that keep their keys."""
    spec = ref.with_lenience(spec, log_lenience)
    environment = Environment()
    noise = NoiseKey(jax.random.key(KEY), step)
    rollout = EpisodeRollout(spec, weights, Requests(PROMPTS, noise, **inputs))
    while not environment.over.all():
        answers = environment.answers(*rollout.run(share))
        rollout.resume(answers, environment.over)
    result = rollout.result()
    return host(result.rollout), result.draft_lens, result.stats, environment.turns


def play_again(spec, weights, drafts=None, step=1, **inputs):
    """Play the same by a rollout for each turn, which computes all that rows hold again."""
    environment = Environment()
    held = None
    draft_lens = 0
    stats = []
    while not environment.over.all():
        of_turn = drafts
        if drafts is not None:
            over = None if held is None else put(environment.over, "batch")
            of_turn = turn_drafts(drafts, held, over, spec.eos_ids)
        result = ref.rollout(
            spec, weights, PROMPTS, step=step, drafts=of_turn, held=held,
            done=environment.over.copy(), **inputs
        )  # fmt: skip
        draft_lens = draft_lens + result.draft_lens
        stats.append(result.stats)
        rollout = host(result.rollout)
        answers = environment.answers(rollout.tokens.ids, rollout.lens, np.ones(ROWS, bool))
        rollout = jax.tree.map(np.array, rollout)
        for row, ids in answers.items():
            new = slice(rollout.lens[row], rollout.lens[row] + len(ids))
            rollout.tokens.ids[row, new] = ids
            rollout.tokens.sources[row, new] = Source.ENVIRONMENT
            rollout.lens[row] += len(ids)
        held = ref.put_rows(rollout)
    return rollout, draft_lens, Stats.total(stats), environment.turns


def with_head(weights, params):
    head = init_draft_head(ref.MODEL, params)
    return weights | {"draft_head": copy_draft_head(ref.MODEL, head, params, None, vocab=0)}


HEAD = {"accept": "match", "draft_head": ref._PLAIN, "max_width": 3}
CASES = {
    "ratio": (1, {"accept": "ratio", "stored_logprobs": 3}),
    "ratio, shards": (2, {"accept": "ratio", "row_buckets": 3}),
    "head": (1, HEAD),
    "head, shards, few rows": (2, HEAD | {"max_rows": 16}),
    "tree, few rows": (1, {"accept": "match", "tree": ref.TREE, "max_width": 4, "max_rows": 12}),
}
SLOW = ("ratio", "head, shards, few rows", "tree, few rows")


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[pytest.mark.slow] * (case in SLOW)) for case in CASES]
)
def test_episodes_are_those_that_begin_again_at_every_turn(make_mesh, case, monkeypatch):
    """Tokens, log-probs, where they come from, and what drafts kept; whoever waits for whom."""
    pieces, options = CASES[case]
    monkeypatch.setattr("specrl_jax.rollout.engine.buckets.FEED_WIDTH", {"cpu": 5})
    with jax.set_mesh(make_mesh(pieces, pieces, pieces)):
        params, weights = ref.policy()
        _, older_weights = ref.policy(0.15)
        if "draft_head" in options:
            weights = with_head(weights, params)
            older_weights = with_head(older_weights, params)
        spec = make_spec(slots=R, eos=EOS, turns=True, **options)
        older, _, _, _ = play(spec, older_weights, step=0)
        drafts = {"drafts": ref.as_drafts(older), "log_lenience": 0.3}
        if spec.draft_source:
            drafts["history"] = ref.history_of(spec, older.tokens.ids, older.lens)
        for inputs in ({}, drafts):
            expected, draft_lens, again, turns = play_again(spec, weights, **inputs)
            assert set(turns.tolist()) == {1, 2, 3, 4}
            for share in (0.0, 0.6):
                got, lens, stats, played = play(spec, weights, share, **inputs)
                but = ("sources",) if spec.max_width > 1 else ()
                check_equal(_without_forced(got), _without_forced(expected), but=but)
                np.testing.assert_array_equal(played, turns)
                np.testing.assert_array_equal(lens, draft_lens)
                if spec.draft_head and not spec.max_rows:
                    assert stats.drafted_tokens == again.drafted_tokens > 0
                assert stats.accepted_tokens == again.accepted_tokens
            if inputs:
                assert stats.accepted_tokens > 0


def test_experts_that_are_kept_are_those_of_rows_that_begin_again(mesh):
    """Experts of an environment's tokens are kept too."""
    model = ref.ONE_LAYER.replace(num_experts=6, experts_per_token=2)
    _, weights = ref.policy(0.0, model)
    options = {"turns": True, "accept": "match", "keeps_routing": True, **ref.ONE_BUCKET}
    spec = make_spec(model, slots=R, eos=EOS, **options)
    got, *_ = play(spec, weights)
    expected, *_ = play_again(spec, weights)
    check_equal(got, expected)
    inside = np.arange(R) < got.lens[:, None]
    assert np.all(got.tokens.routing.any(axis=(2, 3)) == inside)
    assert np.any(got.tokens.sources == Source.ENVIRONMENT)


def _without_forced(rollout):
    """Likeliest tokens are anything where none was drawn."""
    if rollout.tokens.top_ids is None:
        return rollout
    drawn = (rollout.tokens.sources != Source.ENVIRONMENT) & (np.arange(R) < rollout.lens[:, None])
    tops = {name: getattr(rollout.tokens, name) for name in ("top_ids", "top_logprobs")}
    tops = {name: np.where(drawn[:, :, None], x, 0) for name, x in tops.items()}
    return ref.with_tokens(rollout, **tops)


def test_a_token_of_an_episode_is_computed_once(mesh, monkeypatch):
    """Episodes of 2, 4, 8 turns: what is computed beside decode steps grows with the turns, where
    that of rows that start again grows with their square."""
    monkeypatch.setattr(sys.modules[__name__], "R", 72)
    _, weights = ref.policy()
    spec = make_spec(slots=R, eos=tuple(range(1, 8)), turns=True, accept="match", **ref.ONE_BUCKET)
    kept = []
    again = []
    for most in (2, 4, 8):
        monkeypatch.setattr(
            sys.modules[__name__],
            "answer",
            lambda row, turn, tokens, most=most: None if turn == most else [5],
        )
        kept.append(play(spec, weights)[2].prefilled_tokens)
        again.append(play_again(spec, weights)[2].prefilled_tokens)
    assert kept[2] - kept[1] < 2.5 * (kept[1] - kept[0])
    assert again[2] - again[1] > 3 * (again[1] - again[0])


# The law of a turn: it ends with the first token that completes a string within the turn ----------

# What the tokens of `ref.MODEL` write; 1 ends a turn alone.
TEXTS = ["", "", "#", "a", "##", "b", "ab", "]", "<", "/a", ">", "é", "a#", "ba", "c", "] <"]
STRINGS = {
    "overlap": ("##",),
    "several": ("aba", "] </a>", "bb"),
    "longer than a turn": ("##", "ab" * 20),
    "of one letter": ("]",),
}


def ends_turn(tokens: list[int], strings) -> bool:
    text = "".join(TEXTS[token] for token in tokens)
    return tokens[-1] == 1 or any(string in text for string in strings)


def said(row: int, turn: int) -> list[int]:
    """An answer of 0 to 12 tokens that starts, completes or goes on with strings."""
    rng = np.random.default_rng([row, turn])
    count = rng.choice([0, 0, 1, 1, 2, 3, 4, 5, 12])
    return rng.integers(2, 16, count).tolist()


class Player:
    """Episodes of the naive kind: a full forward pass for every token, and texts as they stand."""

    def __init__(self, spec, params, strings, step=1):
        self.tokens = [[] for _ in range(ROWS)]
        self.starts = np.zeros(ROWS, int)
        self.ended = np.zeros(ROWS, bool)
        turns = np.zeros(ROWS, int)
        over = np.zeros(ROWS, bool)
        prompts = np.repeat(PROMPTS.tokens, 4, axis=0)
        prompt_lens = np.repeat(PROMPTS.lens, 4)
        ids = put(np.repeat(PROMPTS.ids, 4, axis=0), "batch", None)
        samples = put(np.tile(np.arange(4, dtype=np.int32), 8), "batch")
        key = jax.random.key(KEY)
        seeds = ref.seeds_of(key, int(Purpose.SAMPLE), np.uint32(step), ids, samples)
        every = np.arange(ROWS)
        while not over.all():
            sequences = np.zeros((ROWS, prompts.shape[1] + R), np.int32)
            for row, own in enumerate(self.tokens):
                sequences[row, : prompt_lens[row]] = prompts[row, : prompt_lens[row]]
                sequences[row, prompt_lens[row] : prompt_lens[row] + len(own)] = own
            lens = np.array([len(own) for own in self.tokens], np.int32)
            scores = ref.full_logits(spec.model, params, sequences)[every, prompt_lens + lens - 1]
            scores = put(scores, "batch", "vocab")
            drawn = np.asarray(ref.sample(scores, seeds, put(lens, "batch"), _PLAIN)[0])
            for row in np.flatnonzero(~over):
                own = self.tokens[row]
                own.append(int(drawn[row]))
                self.ended[row] = ends_turn(own[self.starts[row] :], strings)
                if not self.ended[row] and len(own) < R:
                    continue
                turns[row] += 1
                answer = said(row, turns[row])
                over[row] = not self.ended[row] or len(own) + len(answer) >= R or turns[row] == 6
                if not over[row]:
                    own += answer
                    self.starts[row] = len(own)


def play_by_law(spec, weights, strings, step=1, log_lenience=0.0, **inputs):
    """Return the rollout and its cost; each turn that ends must be one by the law, and each by the
    law must end."""
    noise = NoiseKey(jax.random.key(KEY), step)
    spec = ref.with_lenience(spec, log_lenience)
    rollout = EpisodeRollout(spec, weights, Requests(PROMPTS, noise, **inputs))
    starts = np.zeros(ROWS, int)
    turns = np.zeros(ROWS, int)
    over = np.zeros(ROWS, bool)
    while not over.all():
        tokens, lens, ended = rollout.run(0.0)
        by_law = spec.ended(tokens, lens, starts)
        answers = {}
        for row in np.flatnonzero(ended & ~over).tolist():
            own = tokens[row, starts[row] : lens[row]].tolist()
            assert by_law[row] == ends_turn(own, strings)
            assert by_law[row] or lens[row] == R
            assert not any(ends_turn(own[:n], strings) for n in range(1, len(own)))
            turns[row] += 1
            answer = said(row, turns[row])
            over[row] = not by_law[row] or lens[row] + len(answer) >= R or turns[row] == 6
            if not over[row]:
                answers[row] = answer
                starts[row] = lens[row] + len(answer)
        rollout.resume(answers, over)
    result = rollout.result()
    return host(result.rollout), result.stats, starts


DRAFTS = {
    "match": (1, {"accept": "match"}),
    "match, eight devices": (2, {"accept": "match", "row_buckets": 3}),
    "ratio": (1, {"accept": "ratio"}),
    "ratio, eight devices": (2, {"accept": "ratio", "max_rows": 16}),
    "head": (1, HEAD),
    "tree": (1, {"accept": "match", "tree": ref.TREE, "max_width": 4}),
    "tree, eight devices": (2, {"accept": "match", "tree": ref.TREE, "max_width": 4}),
}
LAWS = [("overlap", case) for case in DRAFTS]
LAWS += [(name, "match") for name in STRINGS if name != "overlap"]
QUICK = {("overlap", "match"), ("several", "match"), ("overlap", "tree, eight devices")}


@pytest.mark.parametrize(
    ("name", "case"),
    [pytest.param(*law, marks=[pytest.mark.slow] * (law not in QUICK)) for law in LAWS],
)
def test_a_turn_ends_by_its_own_tokens(make_mesh, name, case):
    """Against the naive player: without drafts, with those of another policy, with right ones."""
    strings = STRINGS[name]
    pieces, options = DRAFTS[case]
    stop = StopStrings.of(strings, TEXTS)
    with jax.set_mesh(make_mesh(pieces, pieces, pieces)):
        params, weights = ref.policy()
        _, older_weights = ref.policy(0.15)
        if "draft_head" in options:
            weights = with_head(weights, params)
            older_weights = with_head(older_weights, params)
        spec = make_spec(slots=R, eos=(1,), turns=True, stop=stop, **options)
        player = Player(spec, params, strings)
        older, _, _ = play_by_law(spec, older_weights, strings, step=0)
        plain, _, starts = play_by_law(spec, weights, strings)
        for row, own in enumerate(player.tokens):
            assert plain.tokens.ids[row, : plain.lens[row]].tolist() == own
        np.testing.assert_array_equal(starts, player.starts)
        np.testing.assert_array_equal(
            spec.ended(plain.tokens.ids, plain.lens, starts), player.ended
        )
        for source in (older, plain):
            inputs = {"drafts": ref.as_drafts(source), "log_lenience": 0.3}
            if spec.draft_source:
                inputs["history"] = ref.history_of(spec, source.tokens.ids, source.lens)
            played, stats, _ = play_by_law(spec, weights, strings, **inputs)
            assert stats.accepted_tokens > 0
            if spec.accept.samples_every_token:  # others have other tokens, by the same law
                np.testing.assert_array_equal(played.tokens.ids, plain.tokens.ids)
                assert source is older or not stats.row_steps  # a draft is as long as its turn

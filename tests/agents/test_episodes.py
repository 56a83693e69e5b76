"""Episodes against the environment played by itself, the plain forward pass, and without drafts."""

import dataclasses
import threading
from concurrent.futures import ThreadPoolExecutor

import jax
import numpy as np
import pytest
import rollout_reference as ref
from ml_collections import ConfigDict
from rollout_reference import KEY, check_equal, host, make_spec
from small_runs import Sums, play, records, saved, small_config

from specrl_jax import hosts
from specrl_jax import train as loop
from specrl_jax.agents.environment_pool import EnvironmentPool
from specrl_jax.agents.responder import EpisodeResponder
from specrl_jax.agents.turns import turn_drafts
from specrl_jax.rollout.requests import Requests
from specrl_jax.rollout.sampling import NoiseKey
from specrl_jax.rollout.stop_strings import StopStrings
from specrl_jax.text.tokenizer import CharacterTokenizer
from specrl_jax.types import Rollout, Source, Tokens

TOKENIZER = CharacterTokenizer("01234567abcdef")  # no digit that Sums breaks at
R, TURNS = 20, 4


@pytest.fixture(scope="module")
def pool():
    limits = {"timeout": 20.0, "memory_mib": 512, "workers": 2}
    with EnvironmentPool("small_runs:Sums", **limits) as pool:
        yield pool


def prompts_of(target: str = "3"):
    prompts = ref.random_prompts(6)
    examples = tuple(dataclasses.replace(e, answer=target) for e in prompts.examples)
    return dataclasses.replace(prompts, examples=examples)


def run(pool, spec, weights, prompts, step=1, allow_unfinished=0.0, log_lenience=0.0, **inputs):
    spec = ref.with_lenience(spec, log_lenience)
    turns = {"max_turns": TURNS, "allow_unfinished": allow_unfinished}
    responder = EpisodeResponder(pool, TOKENIZER, **turns)
    noise = NoiseKey(jax.random.key(KEY), step)
    return responder.respond(spec, weights, Requests(prompts, noise, **inputs))


def spec_of(**changes):
    return make_spec(slots=R, turns=True, **{"eos": (1, 2)} | changes)


@pytest.fixture(scope="module")
def plain(pool, make_mesh):
    """(responses, parameters, weights) of the match rule without drafts."""
    with jax.set_mesh(make_mesh(1, 1, 1)):
        params, weights = ref.policy()
        return run(pool, spec_of(accept="match"), weights, prompts_of()), params, weights


def test_the_policys_turns_and_what_it_is_told_alternate(plain):
    """Cut at the forced tokens, a row's text is an episode that the environment itself confirms."""
    played, _, _ = plain
    rollout = host(played.rollout)
    counts = set()
    for row, n in enumerate(played.lens.tolist()):
        texts, place = [], 0
        ends_of_turns, rewards = [], []
        reward, done, is_cut = 0.0, False, False
        while place < n:
            ends = [i for i in range(place, n) if rollout.tokens.ids[row, i] in (1, 2)]
            turn = ends[0] + 1 if ends else n
            assert np.all(rollout.tokens.sources[row, place:turn] == Source.SAMPLED)
            texts.append(TOKENIZER.decode(rollout.tokens.ids[row, place:turn].tolist()))
            if ends:  # a turn that the length cut is not handed over
                said, reward, done = play(Sums, texts, "3")
            ends_of_turns.append(turn)
            rewards.append(reward - sum(rewards))
            observation = TOKENIZER.encode(said)
            is_last = done or len(texts) == TURNS
            is_cut = not ends or (not is_last and turn + len(observation) >= R)
            over = is_last or is_cut
            assert over == (turn == n)
            if not over:
                assert (
                    rollout.tokens.ids[row, turn : turn + len(observation)].tolist() == observation
                )
                assert np.all(
                    rollout.tokens.sources[row, turn : turn + len(observation)]
                    == Source.ENVIRONMENT
                )
                place = turn + len(observation)
            else:
                place = n
        none = [0] * (TURNS - len(texts))
        assert played.turns.ends[row].tolist() == ends_of_turns + none
        assert played.turns.rewards[row].tolist() == rewards + none
        answered = len(texts) - 1
        assert played.turns.roles[row].tolist() == ["user"] * answered + [""] * (TURNS - answered)
        assert played.rewards.rewards[row] == reward
        assert played.ended[row] == (not is_cut)
        counts.add((len(texts), done))
    assert {turns for turns, _ in counts} >= {1, 2, TURNS}
    assert {done for _, done in counts} == {True, False}
    assert {*played.ended.tolist()} == {True, False}
    assert not played.rewards.failed.any()


def test_an_answer_is_written_in_its_role(mesh, pool, plain, monkeypatch):
    written = []

    def encode_turn(text, has_end, role):
        written.append(role)
        return TOKENIZER.encode(text)

    def collect(*args, answers=pool.collect):
        return {i: answer._replace(role="tool") for i, answer in answers(*args).items()}

    monkeypatch.setattr(TOKENIZER, "encode_turn", encode_turn)
    monkeypatch.setattr(pool, "collect", collect)
    played = run(pool, spec_of(accept="match"), plain[2], prompts_of())
    expected = np.where(plain[0].turns.roles == "user", "tool", "")
    np.testing.assert_array_equal(played.turns.roles, expected)
    assert {*written} == {"tool"}


def test_log_probs_are_those_of_the_whole_episode(mesh, plain):
    """Teacher-forced: forced tokens are read like all others, and have none themselves."""
    played, params, _ = plain
    rollout, prompts = host(played.rollout), prompts_of()
    expected = ref.teacher_forced(ref.MODEL, params, prompts, rollout.tokens.ids)
    inside = np.arange(R)[None, :] < rollout.lens[:, None]
    drawn = inside & (rollout.tokens.sources != Source.ENVIRONMENT)
    np.testing.assert_allclose(
        rollout.tokens.policy_logprobs, np.where(drawn, expected, 0), atol=1e-5
    )


def test_a_string_ends_a_turn_as_a_token_does(mesh, pool):
    """ "3" is one token here: as a string, and as a token that ends responses."""
    three = TOKENIZER.encode("3")[0]
    stop = StopStrings.of(["3"], TOKENIZER.token_texts())
    _, weights = ref.policy()
    by_string = run(pool, spec_of(accept="match", stop=stop), weights, prompts_of())
    by_token = run(pool, spec_of(eos=(1, 2, three), accept="match"), weights, prompts_of())
    check_equal(host(by_string.rollout), host(by_token.rollout))
    np.testing.assert_array_equal(by_string.rewards.rewards, by_token.rewards.rewards)
    np.testing.assert_array_equal(by_string.turns.ends, by_token.turns.ends)
    forced = host(by_string.rollout).tokens.sources == Source.ENVIRONMENT
    tokens = by_string.tokens
    assert np.any((tokens[:, :-1] == three) & forced[:, 1:])
    # As drafts they are kept whole, turn by turn.
    drafts = ref.as_drafts(by_string.rollout)
    again = run(pool, spec_of(accept="match", stop=stop), weights, prompts_of(), drafts=drafts)
    np.testing.assert_array_equal(again.tokens, tokens)
    assert not again.stats.row_steps


TREES = "trees, few rows"
CHOICES = {
    "previous": {},
    "few rows": {"max_rows": 8, "row_buckets": 3},
    TREES: {"tree": ref.TREE, "max_width": 4, "max_rows": 12, "row_buckets": 3},
}


@pytest.mark.parametrize(
    ("choice", "lost"),
    [
        ("previous", False),
        *((TREES, lost) for lost in (False, True)),
        pytest.param("previous", True, marks=pytest.mark.slow),
        *(pytest.param("few rows", lost, marks=pytest.mark.slow) for lost in (False, True)),
    ],
)
def test_drafts_change_no_token(mesh, pool, plain, choice, lost):
    """Right ones are kept to the end of every turn, over what the environment said in between.

    lost: the drafts are another step's.
    """
    expected, _, weights = plain
    spec, prompts = spec_of(accept="match", **CHOICES[choice]), prompts_of()
    source = expected
    if lost:
        source = run(pool, spec_of(accept="match"), weights, prompts, step=2)
    rollout = source.rollout
    options = {"drafts": ref.as_drafts(rollout)}
    if spec.draft_source:
        tokens = np.asarray(rollout.tokens.ids).reshape(6, 4, R)
        lens = np.asarray(rollout.lens).reshape(6, 4)
        options["history"] = ref.history_of(spec, tokens, lens)
    played = run(pool, spec, weights, prompts, **options)
    new = host(played.rollout)
    check_equal(new, host(expected.rollout), but=("sources", "prefix_lens"))
    np.testing.assert_array_equal(played.rewards.rewards, expected.rewards.rewards)
    forced = np.sum(new.tokens.sources == Source.ENVIRONMENT, axis=1)
    np.testing.assert_array_equal(
        new.tokens.sources == Source.ENVIRONMENT,
        np.asarray(expected.rollout.tokens.sources) == Source.ENVIRONMENT,
    )
    accepted = np.sum(new.tokens.sources == Source.REUSED, axis=1)
    np.testing.assert_array_equal(accepted, new.prefix_lens)
    if lost:
        assert 0 < accepted.sum() < (played.lens - forced).sum() / 2
    else:
        np.testing.assert_array_equal(accepted, played.lens - forced)
        np.testing.assert_array_equal(played.draft_lens, played.lens - forced)


# Few rows at a time contain many, and without drafts the rule has no say.
RULES = {
    "match": {"accept": "match"},
    "match, trees": {"accept": "match", "tree": ref.TREE, "max_width": 4},
    "ratio, few rows": {"accept": "ratio", "max_rows": 8, "row_buckets": 3},
    "block": {"accept": "block", "stored_logprobs": 8},
}
CASES = [("ratio, few rows", True), ("match, trees", False), ("ratio, few rows", False)]
CASES += [
    pytest.param(rule, True, marks=pytest.mark.slow) for rule in ("match", "match, trees", "block")
]


@pytest.mark.parametrize(("rule", "drafted"), CASES)
def test_rows_in_different_turns_are_the_same_rows(mesh, pool, plain, rule, drafted, monkeypatch):
    """Nobody waits for the slowest: the same episodes, in more rollouts, for every rule."""
    weights, spec, options = plain[2], spec_of(**RULES[rule]), {}
    if drafted:
        older = run(pool, spec, ref.policy(0.15)[1], prompts_of())
        options = {"drafts": ref.as_drafts(older.rollout), "log_lenience": 0.3}
    expected = run(pool, spec, weights, prompts_of(), **options)
    answered, submit = [], pool.submit

    def spy(episodes, responses):
        answered.append({len(episode.responses) for episode in episodes})
        return submit(episodes, responses)

    monkeypatch.setattr(pool, "submit", spy)
    collect, late = pool.collect, {}

    def collect_late(episodes, most_waiting):
        """Each third answer comes one call later."""
        before = dict(late)
        late.clear()
        for i, answer in collect(episodes).items():
            (late if i % 3 == 0 else before)[i] = answer
        return before

    monkeypatch.setattr(pool, "collect", collect_late)
    played = run(pool, spec, weights, prompts_of(), allow_unfinished=0.5, **options)
    assert any(len(turns) > 1 for turns in answered)
    new, old = (_without_logprobs_of_forced(host(x.rollout)) for x in (played, expected))
    check_equal(new, old, but=("sources",) if spec.draft_source else ())
    for name in ("lens", "turns"):
        np.testing.assert_array_equal(getattr(played, name), getattr(expected, name))
    np.testing.assert_array_equal(played.draft_lens, expected.draft_lens)
    np.testing.assert_array_equal(played.rewards.rewards, expected.rewards.rewards)


def test_processes_share_the_environments_of_a_rollout(mesh, plain, monkeypatch):
    """Two threads stand for two processes; each runs half of the episodes, both get all."""
    expected, _, weights = plain
    index = threading.local()
    meet = threading.Barrier(2, timeout=300)
    values = [None, None]

    def gather(value):
        values[index.own] = value
        meet.wait()
        both = list(values)
        meet.wait()
        return both

    monkeypatch.setattr(hosts, "gather", gather)
    monkeypatch.setattr(
        hosts, "own_part", lambda n: slice(n * index.own // 2, n * (index.own + 1) // 2)
    )

    def run_process(own):
        index.own = own
        limits = {"timeout": 20.0, "memory_mib": 512, "workers": 1}
        with jax.set_mesh(mesh), EnvironmentPool("small_runs:Sums", **limits) as pool:
            return run(pool, spec_of(accept="match"), weights, prompts_of())

    with ThreadPoolExecutor(2) as threads:
        both = list(threads.map(run_process, range(2)))
    for played in both:
        check_equal(host(played.rollout), host(expected.rollout))
        np.testing.assert_array_equal(played.rewards.rewards, expected.rewards.rewards)
        np.testing.assert_array_equal(played.turns.ends, expected.turns.ends)


def _without_logprobs_of_forced(rollout):
    """No token was drawn there: anything may stand in their place."""
    if rollout.tokens.top_ids is None:
        return rollout
    forced = (rollout.tokens.sources == Source.ENVIRONMENT)[:, :, None]
    top_ids, top_logprobs = (
        np.where(forced, 0, x) for x in (rollout.tokens.top_ids, rollout.tokens.top_logprobs)
    )
    return ref.with_tokens(rollout, top_ids=top_ids, top_logprobs=top_logprobs)


def test_other_answers_of_the_environment_end_a_draft(mesh, pool, plain):
    """The same policy and noise, another target: an episode goes on where it was over before."""
    expected, _, weights = plain
    drafts = ref.as_drafts(expected.rollout)
    other = prompts_of("5")
    without = run(pool, spec_of(accept="match"), weights, other)
    played = run(pool, spec_of(accept="match"), weights, other, drafts=drafts)
    check_equal(host(played.rollout), host(without.rollout), but=("sources", "prefix_lens"))
    longer = played.lens > expected.lens
    assert longer.any()
    assert np.all(played.draft_lens[longer] < played.lens[longer])


def test_what_is_left_of_a_draft_by_hand(mesh, plain):
    """End is token 1. Rows hold 0, 3 and 3 tokens; the third's differ from the draft's."""
    tokens = np.array([[5, 1, 7, 6, 1, 8], [5, 1, 7, 6, 8, 9], [5, 1, 7, 6, 1, 8]], np.int32)
    drafts = ref.plain_drafts(tokens, [6, 6, 6])
    np.testing.assert_array_equal(turn_drafts(drafts, None, None, (1,)).lens, [2, 2, 2])

    def holding(tokens, lens):
        rollout = dataclasses.replace(
            Rollout.empty(3, 6),
            tokens=Tokens(ref.put(tokens, "batch", None)),
            lens=ref.put(np.array(lens, np.int32), "batch"),
        )
        return rollout, rollout.lens > 6

    current = np.where(np.arange(6) < 3, tokens, 0)
    current[2, 2] = 4
    np.testing.assert_array_equal(
        turn_drafts(drafts, *holding(current, [0, 3, 3]), (1,)).lens, [2, 6, 0]
    )
    # 7 is forced and held by the first; the second has all; the third what the draft starts with.
    played = turn_drafts(drafts, *holding(np.where(current == 4, 0, tokens), [3, 6, 2]), (1,))
    np.testing.assert_array_equal(played.lens, [5, 0, 5])


# --- runs -----------------------------------------------------------------------------------------

RUN = {
    "environment.name": "guess", "environment.max_turns": 3, "reward.extract": "",
    "data.source": "guess", "data.name": "guess", "data.prompts": 12,
    "data.prompt_len": 4, "tokenizer.alphabet": "0123456789-?<>",
    "rollout.response_len": 10, "rollout.accept": "match", "rollout.max_width": 2,
    "rollout.adaptive": False, "rollout.row_buckets": 1,
    "updates.learning_rate": 0.005, "updates.skip_no_signal": False, "train.epochs": 2,
}  # fmt: skip


def _config(draft: str, algorithm: str):
    config = small_config(algorithm=algorithm)
    config.data.options = ConfigDict()  # of the game
    config.update_from_flattened_dict(RUN | {"rollout.draft": draft})
    return config


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["grpo", "ppo"])
def test_a_run_with_drafts_is_the_run_without(mesh, tmp_path, algorithm):
    """Losslessly: the same rewards, losses and weights, to rounding."""
    plain, drafted = tmp_path / "plain", tmp_path / "drafted"
    loop.train(_config("none", algorithm), plain)
    loop.train(_config("previous+tree", algorithm), drafted)
    undrafted, other = records(plain)[1:], records(drafted)[1:]
    for name in ("reward/mean", "rollout/turns_mean", "rollout/tokens_environment"):
        assert [r[name] for r in undrafted] == [r[name] for r in other]
    assert all(r["rollout/turns_mean"] > 1 for r in undrafted)
    assert other[-1]["rollout/draft_accept_rate"] > 0
    steps = len(undrafted)
    weights = [saved(workdir, steps) for workdir in (plain, drafted)]
    for name, array in weights[0].items():
        if name.startswith("train.policy.params"):
            np.testing.assert_allclose(array, weights[1][name], atol=2e-4, err_msg=name)
    # Absent where the first mini-batch has no signal.
    gaps = [r.get("policy/rollout_train_logprob_gap") for r in undrafted]
    assert any(gaps)
    assert all(gap < 1e-5 for gap in gaps if gap is not None)

"""Which drafts are verified: by hand, in rollouts and in whole runs. No choice changes a token."""

import json
import types

import jax
import numpy as np
import pytest
import rollout_reference as ref
from rollout_reference import check_equal
from small_runs import assert_same_run, interrupt, records, run_until_killed, small_config
from test_reused_noise import CHANGES, responses

from specrl_jax import train as loop
from specrl_jax.rollout.engine.decode import decode_steps
from specrl_jax.rollout.engine.prefill import prefill
from specrl_jax.rollout.generate import generate
from specrl_jax.rollout.requests import Requests
from specrl_jax.rollout.sampling import NoiseKey
from specrl_jax.rollout.verification import Verification, _draft_slots, time_verification
from specrl_jax.telemetry.metrics import MetricsLog

Q, G, R = 8, 4, 8
DEAR = (1.0, 1e-3)  # seconds of a slot, and of a decoded token
CHEAP = (1e-3, 1.0)


def requests(prompts, drafts, *, step=5, reused=()) -> Requests:
    """Rows on fresh noise, except those of the groups `reused`."""
    steps = np.full((Q, G), step)
    steps[list(reused)] = 1
    return Requests(prompts, NoiseKey(jax.random.key(ref.KEY), step, noise_steps=steps), drafts)


@pytest.fixture
def rollouts(mesh):
    """(spec, weights, prompts, drafts of an earlier policy)."""
    spec = ref.match_spec(slots=R)
    prompts = ref.random_prompts(Q)
    drafts = ref.as_drafts(
        ref.rollout(spec, ref.policy(0.3, ref.ONE_LAYER)[1], prompts, step=5).rollout
    )
    return spec, ref.policy(model=ref.ONE_LAYER)[1], prompts, drafts


def test_the_worked_example():
    """3 ms a slot, 6 ms a token: 1,000 slots for 700 tokens pay, 400 for 100 do not."""
    choice = Verification((3e-3, 6e-3), slots=[400.0, 1000.0], accepted=[100.0, 700.0])
    (line,) = choice.review()
    assert line.startswith("drafts on fresh noise cost 2.0 x what they save: from now on not ver")
    assert choice.skips == [True, False]
    assert choice.review() == []  # a choice that stays is not told again
    choice.accepted = [201.0, 499.0]
    first, second = choice.review()
    assert "fresh noise cost 1.0 x what they save: from now on verified" in first
    assert "reused noise cost 1.0 x what they save: from now on not verified" in second


@pytest.mark.parametrize("choice", [Verification(), Verification(DEAR)], ids=["seconds", "counts"])
def test_what_is_not_known_is_verified(rollouts, choice):
    asked = requests(*rollouts[2:])
    assert choice.review() == []
    assert choice.skip(asked) is asked


def test_slots_of_drafts_by_hand():
    """Up to the first rejection, and of what is behind there the same share."""
    lens = np.array([4, 4, 10, 0])
    accepted = np.array([4, 1, 0, 0])  # decided on: 4, 2 and 1
    np.testing.assert_allclose(_draft_slots(lens, accepted, 7), [4, 2, 1, 0])
    np.testing.assert_allclose(_draft_slots(lens, accepted, 18), [4, 4, 10, 0])
    np.testing.assert_allclose(_draft_slots(lens, accepted, 36), [8, 8, 20, 0])  # half are empty
    np.testing.assert_allclose(_draft_slots(lens, accepted, 12.5), [4, 3, 5.5, 0])


def test_drafts_are_skipped_by_kind_and_some_are_probed(rollouts):
    """One group in 16 is probed, another at each step; tokens stay the same."""
    spec, weights, prompts, drafts = rollouts
    choice = Verification(DEAR, skips=[True, False])
    asked = requests(prompts, drafts, step=13, reused=[0, 1])
    lens = np.asarray(drafts.lens).reshape(Q, G)
    given = np.asarray(choice.skip(asked).drafts.lens).reshape(Q, G)
    verified = [0, 1, 3]  # on reused noise; (3 + 13) % 16 == 0
    np.testing.assert_array_equal(given[verified], lens[verified])
    assert not given[[2, 4, 5, 6, 7]].any()
    assert choice.take_metrics() == {"rollout/drafts_skipped": 5 / 8}
    assert choice.take_metrics() == {}
    expected = generate(spec, weights, asked)
    result = generate(spec, weights, choice.skip(asked))
    check_equal(result.rollout, expected.rollout, but=("sources", "draft_logprobs", "prefix_lens"))
    assert result.stats.verified_tokens < expected.stats.verified_tokens


def test_counts_by_hand(rollouts):
    """All drafts are computed whole here; older counts fade."""
    spec, weights, prompts, drafts = rollouts
    choice = Verification(DEAR, slots=[100.0, 4.0], accepted=[40.0, 3.0])
    asked = requests(prompts, drafts, reused=[0, 1])
    result = generate(spec, weights, asked)
    choice.observe(asked, result)
    accepted = np.asarray(result.rollout.prefix_lens)
    rows = np.arange(Q * G) < 2 * G
    assert choice.accepted == [30 + accepted[~rows].sum(), 2.25 + accepted[rows].sum()]
    lens = np.asarray(drafts.lens)
    share = result.stats.draft_slots / lens.sum()
    assert share >= 1
    expected = [75 + share * lens[~rows].sum(), 3 + share * lens[rows].sum()]
    assert choice.slots == pytest.approx(expected)


def test_tokens_of_earlier_drafts_are_not_counted():
    """A row that resumes had accepted 6 tokens before; its draft of 2 more saves at most 2."""
    result = types.SimpleNamespace(
        rollout=types.SimpleNamespace(prefix_lens=np.array([7])),
        draft_lens=np.array([2]),
        stats=types.SimpleNamespace(draft_slots=2.0),
    )
    prompts = ref.make_prompts([[1]], 3)
    drafts = types.SimpleNamespace(lens=np.array([8]))
    choice = Verification()
    choice.observe(Requests(prompts, NoiseKey(None, 5), drafts), result)
    assert (choice.slots, choice.accepted) == ([2.0, 0.0], [2.0, 0.0])


def test_a_resumed_choice_is_the_same():
    choice = Verification((0.1, 0.3), [1.5, 2.5], [0.25, 1.0], [False, True])
    text = json.dumps(choice.host())
    assert Verification().restore(json.loads(text)) == choice
    assert Verification().restore(json.loads(json.dumps(Verification().host()))) == Verification()


def test_what_a_checkpoint_was_given_stays_as_it_was():
    choice = Verification((1.0, 1.0), slots=[4.0, 0.0], accepted=[1.0, 0.0])
    given = choice.host()
    text = json.dumps(given)
    choice.review()
    choice.slots[1] = 9.0
    choice.accepted[1] = 9.0
    assert json.dumps(given) == text


def test_timing_runs_the_programs_of_rollouts(rollouts):
    spec, weights, prompts, drafts = rollouts
    asked = requests(prompts, drafts)
    generate(spec, weights, asked)
    held = ref.rollout(spec, weights, prompts, step=5).rollout
    generate(spec, weights, Requests(prompts, asked.noise, ref.as_drafts(held), held=held))
    programs = prefill._cache_size(), decode_steps._cache_size()
    assert min(time_verification(spec, weights, asked)) > 0
    assert (prefill._cache_size(), decode_steps._cache_size()) == programs


# In runs --------------------------------------------------------------------------------------

RUN = CHANGES | {"rollout.adaptive": True}


def set_seconds(monkeypatch, seconds) -> None:
    monkeypatch.setattr(loop, "time_verification", lambda *_: seconds)


def test_a_run_without_costly_drafts_has_the_same_responses(tmp_path, mesh, monkeypatch, capsys):
    set_seconds(monkeypatch, DEAR)
    loop.train(small_config(RUN), tmp_path / "dear")
    out = capsys.readouterr().out
    assert "drafts on reused noise cost" in out
    assert "from now on not verified, except 1 group in 16 (rollout.adaptive)" in out
    set_seconds(monkeypatch, CHEAP)
    loop.train(small_config(RUN), tmp_path / "cheap")
    assert "from now on" not in capsys.readouterr().out
    assert responses(tmp_path / "dear") == responses(tmp_path / "cheap")
    dear, cheap = (records(tmp_path / name) for name in ("dear", "cheap"))
    assert [r.get("rollout/drafts_skipped") for r in cheap[3:]] == [0] * 4
    assert dear[-1]["rollout/drafts_skipped"] > 0.5
    assert dear[-1]["rollout/tokens_reused"] < cheap[-1]["rollout/tokens_reused"]


@pytest.mark.slow
def test_a_killed_run_chooses_as_one_that_was_not(mesh, tmp_path, monkeypatch):
    changes = RUN | {"checkpoint.every": 1}
    run_until_killed(_killed, tmp_path / "killed", changes)
    set_seconds(monkeypatch, CHEAP)  # not timed again: the checkpoint has the seconds
    loop.train(small_config(changes), tmp_path / "killed")
    set_seconds(monkeypatch, DEAR)
    loop.train(small_config(changes), tmp_path / "plain")
    assert_same_run(tmp_path / "killed", tmp_path / "plain", 6)
    assert records(tmp_path / "plain")[-1]["rollout/drafts_skipped"] > 0.5


def _killed(workdir, changes):
    loop.time_verification = lambda *_: DEAR
    interrupt(MetricsLog, "write", 4)
    loop.train(small_config(changes), workdir)

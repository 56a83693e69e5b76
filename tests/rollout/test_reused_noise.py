"""Exact reuse: which noise a sample uses, and what rollouts on reused noise emit."""

import collections
import json

import jax
import numpy as np
import pytest
import rollout_reference as ref
from rollout_reference import as_drafts, check_equal, host, make_prompts, match_spec, p_value
from small_runs import assert_same_run, interrupt, records, run_until_killed, small_config

from specrl_jax import train as loop
from specrl_jax.rollout.generate import generate
from specrl_jax.rollout.requests import Requests
from specrl_jax.rollout.reused_noise import ReusedNoise
from specrl_jax.rollout.sampling import NoiseKey
from specrl_jax.telemetry.metrics import MetricsLog
from specrl_jax.telemetry.records import read_rollouts

B, G, R = 32, 4, 8
SIGNAL = np.array([[0.0, 1.0, 0.0, 1.0]])


# --- which noise ----------------------------------------------------------------------------------

ONE_PROMPT = make_prompts([[5]], 6)


EQUAL = np.array([[1.0] * 4])
# name → n, refresh, and of every visit: its step, its rewards, the noise that it uses
VISITS = {
    "the worked group": (3, 0.25, [
        (1, SIGNAL, [1, 1, 1, 1]), (5, SIGNAL, [5, 1, 1, 1]), (9, SIGNAL, [5, 9, 1, 1]),
        # The last two have had their three visits; the oldest, refreshed, is one of them.
        (13, SIGNAL, [5, 9, 13, 13])]),
    "a group stays for its visits": (2, 0.0, [
        (1, SIGNAL, [1] * 4), (2, SIGNAL, [1] * 4), (3, SIGNAL, [3] * 4), (4, SIGNAL, [3] * 4),
        (7, SIGNAL, [7] * 4)]),
    "without signal": (9, 0.0, [(1, SIGNAL, [1] * 4), (2, EQUAL, [1] * 4), (3, SIGNAL, [3] * 4)]),
    "less than a sample is one": (9, 0.05, [(1, SIGNAL, [1] * 4), (2, SIGNAL, [2, 1, 1, 1])]),
}  # fmt: skip


@pytest.mark.parametrize(("visits", "refresh", "steps"), VISITS.values(), ids=VISITS)
def test_visits_by_hand(visits, refresh, steps):
    """A checkpoint after each one continues identically."""
    noise = ReusedNoise(visits, refresh, G)
    before = np.zeros((1, G))
    for step, rewards, expected in steps:
        got = noise.noise_steps(ONE_PROMPT, step)
        assert got.tolist() == [expected]
        np.testing.assert_array_equal(noise.observe(ONE_PROMPT, got, rewards), got == before)
        before = got
        host = json.loads(json.dumps(noise.host()))
        noise = ReusedNoise(visits, refresh, G).restore(host, {})


def test_with_a_critic_every_group_teaches():
    noise = ReusedNoise(9, 0.0, G, needs_signal=False)
    noise.observe(ONE_PROMPT, noise.noise_steps(ONE_PROMPT, 1), EQUAL)
    assert noise.noise_steps(ONE_PROMPT, 2).tolist() == [[1] * 4]


def test_prompts_are_apart_and_what_is_not_observed_changes_nothing():
    noise = ReusedNoise(9, 0.0, G)
    prompts = ref.random_prompts(3)
    rewards = np.array([[0, 1, 0, 0], [0, 0, 0, 0], [1, 1, 1, 0]], float)
    noise.observe(prompts, noise.noise_steps(prompts, 1), rewards)
    for _ in range(2):  # asked for ahead, as a run-ahead rollout does
        assert noise.noise_steps(prompts, 4).tolist() == [[1] * 4, [4] * 4, [1] * 4]
    order = [2, 0]
    assert noise.noise_steps(prompts.select(order), 5).tolist() == [[1] * 4] * 2


# --- rollouts -------------------------------------------------------------------------------------

KINDS = {
    "none": (1, False),
    "previous": (1, True),
    "tree": (4, False),
    "previous+tree": (4, True),
}


@pytest.mark.parametrize(
    ("kind", "shape"),
    [
        ("none", (1, 1, 1)), ("previous+tree", (2, 2, 2)),
        *(pytest.param(x, (1, 1, 1), marks=pytest.mark.slow) for x in KINDS if x != "none"),
    ],
)  # fmt: skip
def test_every_row_is_that_of_its_own_noise(make_mesh, shape, kind):
    """Rows of steps 1, 2 and 3 in one rollout of step 9."""
    width, previous = KINDS[kind]
    with jax.set_mesh(make_mesh(*shape)):
        prompts, weights = ref.random_prompts(), ref.policy(0.0, ref.ONE_LAYER)[1]
        steps = np.random.default_rng(2).integers(1, 4, (8, G))
        spec = match_spec(width)
        drafts = as_drafts(ref.run(match_spec(), weights, prompts, 1)[0]) if previous else None
        noise = NoiseKey(jax.random.key(ref.KEY), 9, noise_steps=steps)
        result = generate(spec, weights, Requests(prompts, noise, drafts))
        mixed = host(result.rollout)
        for step in (1, 2, 3):
            rows = np.flatnonzero(steps.reshape(-1) == step)
            assert len(rows) > 5
            plain = host(ref.run(match_spec(), weights, prompts, step)[0])
            part = jax.tree.map(lambda x, rows=rows: x[rows], mixed)
            but = ("origin_steps", "prefix_lens", "sources")
            check_equal(part, plain, rows, but=but)
            whole = previous and step == 1
            assert (part.prefix_lens == part.lens).all() == whole
        assert (mixed.tokens.origin_steps[:, 0] == 9).all()


# Distributions of the next token after each of three tokens, of an older and a newer policy.
OLD = np.array([[0.5, 0.3, 0.2], [0.2, 0.5, 0.3], [0.3, 0.3, 0.4]])
NEW = np.array([[0.6, 0.3, 0.1], [0.25, 0.4, 0.35], [0.3, 0.2, 0.5]])


def test_responses_on_reused_noise_are_exact_and_mostly_the_last_ones(mesh):
    """All responses of three tokens, enumerated. First tokens are equal with probability
    Σ_y 1 / Σ_x max(p_x / p_y, q_x / q_y), so they differ with at most 2 TV / (1 + TV) (arXiv
    2408.07978)."""
    prompts = make_prompts([[0]] * 512, 1)
    (model, _, old), (_, _, new) = ref.table_policy(OLD), ref.table_policy(NEW)
    spec = ref.make_spec(model, accept="match", eos=(2,), slots=3, prompt_slots=1)
    exact = ref.responses(ref.by_last(NEW, 0), 3, (2,))
    counts = collections.Counter()
    differ = whole = total = 0
    for step in range(1, 9):
        before = ref.run(spec, old, prompts, step)[0]
        noise = NoiseKey(jax.random.key(ref.KEY), 50 + step, noise_steps=np.full((512, G), step))
        inputs = Requests(prompts, noise, as_drafts(before))
        after = host(generate(spec, new, inputs).rollout)
        fresh = ref.run(spec, new, prompts, step)[0]
        check_equal(after, fresh, but=("origin_steps", "prefix_lens", "sources"))
        counts.update(tuple(row[:n].tolist()) for row, n in zip(after.tokens.ids, after.lens))
        before = host(before)
        differ += np.sum(after.tokens.ids[:, 0] != before.tokens.ids[:, 0])
        whole += np.sum(after.prefix_lens == after.lens)
        total += len(after.lens)
    observed = np.array([counts[response] for response in exact])
    assert observed.sum() == total == 8 * 512 * G
    assert p_value(observed, np.array(list(exact.values()))) > 1e-4
    distance = 0.5 * np.abs(OLD[0] - NEW[0]).sum()
    bound = 2 * distance / (1 + distance)
    p, q = OLD[0], NEW[0]
    equal = sum(1 / np.maximum(p / p[y], q / q[y]).sum() for y in range(3))
    assert 1 - equal <= bound < (1 - p @ q) / 2  # as often as that with fresh noise
    assert abs(differ / total - (1 - equal)) < 4 * np.sqrt(equal * (1 - equal) / total)
    assert whole / total > 0.6


# --- training -------------------------------------------------------------------------------------

CHANGES = {
    "rollout.accept": "match", "rollout.draft": "previous", "rollout.noise_epochs": 3,
    "rollout.noise_refresh": 0.25, "rollout.adaptive": False, "rollout.max_width": 4,
    "rollout.row_buckets": 2, "train.epochs": 3, "updates.learning_rate": 2e-3,
    "log.rollouts": 1.0,
}  # fmt: skip
SPEED = {
    "curriculum.name": "speed", "curriculum.screening": 4, "data.prompts": 40,
    "rollout.prompts_per_step": 4, "updates.mini_batch_size": 16, "data.options.max_numbers": 2,
    "data.prompt_len": 6, "reward.name": "small_runs:score_first_letter", "reward.extract": "",
    "train.epochs": 0, "train.steps": 6,
}  # fmt: skip
WAYS = {
    "previous": {},
    "tree": {"rollout.draft": "tree"},
    "both": {"rollout.draft": "previous+tree"},
    "head": {"rollout.draft": "previous+tree+head", "rollout.head.vocab": 8},
    "run ahead": {"rollout.run_ahead": True},
    "run ahead alone": {"rollout.draft": "none", "rollout.run_ahead": True},
    "mopps": {"curriculum.name": "mopps"},
    "speed": SPEED,
    "dapo": SPEED | {
        "curriculum.name": "uniform", "algorithm.dynamic_sampling": True, "data.prompts": 12,
    },
    "turns": {
        "environment.name": "small_runs:Sums", "reward.timeout": 5.0, "environment.max_turns": 3,
        "rollout.response_len": 16, "reward.extract": "",
    },
    "a critic": {"critic.kind": "head"},
    "partial": {"rollout.partial": 4},
}  # fmt: skip


def responses(workdir) -> list[tuple]:
    names = ("step", "prompt_id", "sample", "token_ids", "reward")
    last = records(workdir)[-1]["step"]
    lines = [line for step in range(1, last + 1) for line in read_rollouts(workdir, step)]
    return [tuple(map(str, map(line.get, names))) for line in lines]


@pytest.mark.parametrize(
    "way", [pytest.param(w, marks=[pytest.mark.slow] * (w != "previous")) for w in WAYS]
)
def test_training_is_the_same_with_and_without_drafts(tmp_path, mesh, way):
    """Every response of every step, though the policy learns from them in between."""
    changes = CHANGES | WAYS[way]
    loop.train(small_config(changes), tmp_path / "drafts")
    without = {"rollout.draft": "none", "rollout.run_ahead": False}
    loop.train(small_config(changes | without), tmp_path / "plain")
    assert responses(tmp_path / "drafts") == responses(tmp_path / "plain")
    drafted, plain = (records(tmp_path / x)[1:] for x in ("drafts", "plain"))
    saved = [sum(r["rollout/tokens_reused"] + r["rollout/tokens_drafted"] for r in run)
             for run in (drafted, plain)]  # fmt: skip
    assert saved[0] > 100
    assert saved[1] == 0
    # Reused noise saves more than fresh noise does by chance.
    if way == "previous":
        fresh = {"rollout.noise_epochs": 1, "rollout.noise_refresh": 0.0}
        loop.train(small_config(changes | fresh), tmp_path / "fresh")
        by_chance = sum(r["rollout/tokens_reused"] for r in records(tmp_path / "fresh")[1:])
        assert saved[0] > 1.3 * by_chance
    assert all(0 <= r.get("rollout/run_ahead_accepted", 0) <= 1 for r in drafted)
    if way == "run ahead alone":
        # Every step starts the next one's responses; all but the first have some.
        begun = [0, *(r["rollout/tokens_run_ahead"] for r in drafted)]
        assert all(begun[1:])
        accepted = [r.get("rollout/run_ahead_accepted", 0) for r in drafted]
        assert accepted[0] == 0
        assert all(0 < share < 1 for share in accepted[1:])
        reused = [r["rollout/tokens_reused"] for r in drafted]
        assert reused == pytest.approx(np.multiply(accepted, begun[:-1]))
    kept = [r["rollout/reused_noise"] for r in drafted]
    assert kept[0] == 0
    assert max(kept) > 0.2


@pytest.mark.slow
def test_a_killed_run_goes_on_with_its_noise(mesh, tmp_path):
    changes = CHANGES | {"checkpoint.every": 1}
    run_until_killed(_killed, tmp_path / "killed", changes)
    for workdir in (tmp_path / "killed", tmp_path / "plain"):
        loop.train(small_config(changes), workdir)
    assert_same_run(tmp_path / "killed", tmp_path / "plain", 6)


def _killed(workdir, changes):
    interrupt(MetricsLog, "write", 3)
    loop.train(small_config(changes), workdir)

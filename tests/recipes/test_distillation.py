"""Distillation against exact sums over a small vocabulary; and runs with a teacher."""

import dataclasses
import itertools
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import rollout_reference as ref
from scipy import special
from small_runs import line_of, records, small_config
from update_reference import LEARNER, distance, on_mesh, pack

from specrl_jax import train as loop
from specrl_jax.algorithms.losses import LossConfig
from specrl_jax.algorithms.scoring import logprobs, with_model
from specrl_jax.algorithms.update import update
from specrl_jax.algorithms.update_spec import init_policy_state
from specrl_jax.compile import memory
from specrl_jax.models import hf, transformer
from specrl_jax.models.load import load_policy
from specrl_jax.models.transformer import Transformer
from specrl_jax.recipes.distillation import FullKl, ScoreKl, check_tokens, full_kl, score_kl
from specrl_jax.settings import schema
from specrl_jax.text.tokenizer import CharacterTokenizer
from specrl_jax.types import Batch

V = 5


@pytest.fixture
def float64():
    with jax.enable_x64(True):
        yield


exact = pytest.mark.usefixtures("float64")


def _logits(seed: int):
    return np.random.default_rng(seed).normal(size=V)


def _exact_gradient(student, teacher):
    """π_v·(d_v − KL), by the logits."""
    p = special.softmax(student)
    gap = np.log(p) - np.log(special.softmax(teacher))
    return p @ gap, p * (gap - p @ gap)


@exact
@pytest.mark.parametrize("seed", range(3))
def test_the_full_sum_has_the_exact_gradient(seed):
    student, teacher = _logits(seed), _logits(seed + 10)
    value, slope = jax.value_and_grad(full_kl)(student, teacher)
    expected, gradient = _exact_gradient(student, teacher)
    assert float(value) == pytest.approx(expected)
    np.testing.assert_allclose(slope, gradient, rtol=1e-9)
    assert not np.any(jax.grad(full_kl, argnums=1)(student, teacher))


@exact
@pytest.mark.parametrize("moved", [0.0, 0.5])
def test_the_score_estimator_has_it_in_the_mean(moved):
    """Over y ~ π_old, also where the weights have moved since the rollout."""
    student, teacher = _logits(1), _logits(2)
    old = special.log_softmax(student - moved * _logits(3))
    log_t = special.log_softmax(teacher)

    def term(logits, token):
        logprob = jax.nn.log_softmax(logits)[token]
        return score_kl(logprob, log_t[token], logprob - old[token])

    pairs = [jax.value_and_grad(term)(student, token) for token in range(V)]
    values, slopes = (np.stack(x) for x in zip(*pairs))
    expected, gradient = _exact_gradient(student, teacher)
    probs = np.exp(old)
    assert probs @ values == pytest.approx(expected)
    np.testing.assert_allclose(probs @ slopes, gradient, rtol=1e-9)


def test_the_worked_example():
    student, teacher = jnp.zeros(2), jnp.log(jnp.array([0.8, 0.2]))
    value, slope = jax.value_and_grad(full_kl)(student, teacher)
    assert float(value) == pytest.approx(0.22314, abs=1e-5)
    np.testing.assert_allclose(slope, [-0.34657, 0.34657], atol=1e-5)


@exact
def test_the_teacher_itself_has_nothing_to_learn():
    student = _logits(4)
    np.testing.assert_allclose(jax.grad(full_kl)(student, student + 3.0), 0, atol=1e-12)


@exact
def test_tokens_that_are_cut_off_count_with_nothing():
    """Padded vocabularies have logits of -inf; the other tokens are as without them."""
    student, teacher = _logits(5), _logits(6)
    value, slope = jax.value_and_grad(full_kl)(student, teacher)
    padded = np.append(student, -np.inf)
    for other in (-np.inf, 0.0):
        wide = np.append(teacher, other)
        cut_value, cut_slope = jax.value_and_grad(full_kl)(padded, wide)
        assert np.all(np.isfinite(cut_slope))
        assert cut_slope[-1] == 0
        if other == -np.inf:
            assert float(cut_value) == pytest.approx(float(value))
            np.testing.assert_allclose(cut_slope[:-1], slope, rtol=1e-9)


# The update ----------------------------------------------------------------------------------

MODEL = ref.MODEL.replace(vocab_size=6, num_layers=1)
# Of a padded vocabulary.
TEACHER = ref.MODEL.replace(vocab_size=8, num_layers=2, unused_ids=((6, 8),))
PROMPT = (4, 1)
LONGEST = 2
ROWS = list(itertools.product(range(6), repeat=LONGEST))
TOKENS = np.array([PROMPT + row for row in ROWS], np.int32)
COEF = 0.3


def _place(model, nudge=0.0):
    return transformer.place_params(model, ref.host_params(model, nudge))


def _all_logits(model, params):
    """Tempered logits [rows, R, V] of every response's tokens."""
    network = Transformer(model, params)
    hidden = network(jax.sharding.reshard(jnp.array(TOKENS), jax.P(("data", "fsdp"))))[0]
    logits = jax.sharding.reshard(network.logits(hidden), jax.P(None, None, None))
    return logits[:, 1 : 1 + LONGEST] / LEARNER.temperature


def _batch(old) -> Batch:
    """Every response once; its weight is its probability under the old policy."""
    sampled = np.take_along_axis(old, TOKENS[:, 2:, None], axis=-1)[..., 0]
    probs = np.exp(sampled.sum(axis=1))
    return Batch(
        tokens=TOKENS,
        prompt_lens=np.full(len(ROWS), 2, np.int32),
        response_lens=np.full(len(ROWS), LONGEST, np.int32),
        old_logprobs=np.float32(sampled),
        advantages=np.zeros_like(sampled, np.float32),
        importance_weights=np.float32(np.tile(probs[:, None] * sampled.size, (1, LONGEST))),
    )


@pytest.mark.parametrize(("packing", "chunk"), [("trie", 1), ("rows", 64)])
def test_both_estimators_have_the_gradient_of_the_enumerated_kl(mesh, packing, chunk):
    """Σ_y π_old(y) Σ_t c·KL(π ‖ π_T) with contexts fixed, two updates after the rollout.

    The full sum does not read weights of tokens: its rows are as often there as in the rollout.
    """
    old = np.asarray(jax.nn.log_softmax(_all_logits(MODEL, _place(MODEL, 0.2))), np.float64)
    teacher = _all_logits(TEACHER, _place(TEACHER))[..., :6]
    batch = _batch(old)
    probs = batch.importance_weights[:, 0] / batch.old_logprobs.size

    def exact_loss(params, weights):
        kl = full_kl(_all_logits(MODEL, params), teacher)
        return COEF * jnp.sum(weights[:, None] * kl)

    def gradient(kind, batch):
        term = kind(COEF, TEACHER, LEARNER.temperature)
        loss = LossConfig(max_response_len=LONGEST, importance_cap=1e9, terms=(term,))
        spec = dataclasses.replace(
            LEARNER, model=MODEL, loss=loss, packing=packing, logits_chunk=chunk
        )
        frozen = _place(TEACHER)
        placed = on_mesh(batch)
        packed = pack(placed, spec, range(len(ROWS)))
        scored = logprobs(with_model(spec, TEACHER), frozen, packed)
        placed = dataclasses.replace(placed, extra={"teacher_logprobs": scored})
        state = init_policy_state(spec, _place(MODEL))
        state, sums = update(spec, state, placed, packed, None, frozen)
        return state.policy.opt_state, sums

    want = jax.grad(exact_loss)(_place(MODEL), jnp.float32(np.ones(len(ROWS)) / len(ROWS)))
    got, sums = gradient(FullKl, dataclasses.replace(batch, importance_weights=None))
    got = jax.tree.map(lambda x: x * LONGEST, got)
    assert distance(got, want) < 1e-4
    total, count = sums["policy/teacher_kl"]
    kl = full_kl(_all_logits(MODEL, _place(MODEL)), teacher)
    assert total / count == pytest.approx(float(jnp.mean(kl)), rel=1e-4)
    got, _ = gradient(ScoreKl, batch)
    want = jax.grad(exact_loss)(_place(MODEL), jnp.float32(probs))
    assert distance(got, want) < 1e-4


# Runs ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def teacher(make_mesh, tmp_path_factory):
    """A random policy of the small runs' tokens and another shape, as a directory."""
    folder = tmp_path_factory.mktemp("teacher")
    config = small_config({"model.num_layers": 2, "model.embed_dim": 32, "seed": 5})
    tokenizer = CharacterTokenizer(config.tokenizer.alphabet)
    with jax.set_mesh(make_mesh(1, 1, 1)):
        model, params = load_policy(config, tokenizer.vocab_size)
        hf.save(folder, model, params, token_ids=tokenizer.token_ids)
    tokenizer.save(folder)
    return folder


def test_the_teacher_has_the_policys_tokens(mesh, teacher, tmp_path):
    check_tokens(str(teacher), CharacterTokenizer("0123456789 <>;"))
    line = line_of(check_tokens, str(teacher), CharacterTokenizer("0123456798 <>;"))
    assert line == (
        f"distill.teacher must have the policy's tokens, got {str(teacher)!r}, whose token 10 is "
        "'8' where the policy's is '9'"
    )
    missing = str(tmp_path / "none" / "there" / "x")
    line = line_of(check_tokens, missing, CharacterTokenizer("01"))
    assert line.startswith("distill.teacher must be an existing directory or file")
    # The plan of memory reads its shape first.
    assert line_of(memory.check, small_config({"distill.teacher": missing}), MODEL, 32) == line


@pytest.mark.parametrize(
    "changes",
    [
        {"distill.estimator": "full", "updates.packing": "trie"},
        {"distill.estimator": "score", "rollout.accept": "match", "rollout.noise_epochs": 2},
        {"distill.estimator": "full", "lora.rank": 2, "distill.reward_weight": 1.0},
        {"distill.estimator": "score", "algorithm.importance_cap": 2.0, "rollout.staleness": 1},
    ],
)
def test_a_run_comes_nearer_to_its_teacher(mesh, tmp_path, teacher, changes):
    """All rows teach, also those without an advantage."""
    changes = {"distill.teacher": str(teacher), "train.epochs": 4} | changes
    loop.train(small_config(changes), tmp_path)
    lines = records(tmp_path)[1:]
    kl = [x["policy/teacher_kl"] for x in lines]
    assert np.mean(kl[-2:]) < kl[0]
    assert all(x["update/signal_fraction"] == 1 for x in lines)


@pytest.mark.slow
def test_a_resumed_run_needs_the_same_teacher(mesh, tmp_path, teacher):
    folder = tmp_path / "teacher"
    shutil.copytree(teacher, folder)
    config = small_config({"distill.teacher": str(folder), "train.steps": 2})
    loop.train(config, tmp_path / "run")
    config.train.steps = 3
    model, params = hf.load(str(folder))
    params["final_norm"] *= 2
    hf.save(folder, model, params)
    CharacterTokenizer(config.tokenizer.alphabet).save(folder)
    line = line_of(loop.train, config, tmp_path / "run")
    assert line.startswith(
        "data must be as in the checkpoint: the weights that are not trained were "
    )


def test_what_is_refused(teacher):
    config = small_config({
        "distill.teacher": str(teacher), "distill.estimator": "score", "rollout.top_k": 4,
        "algorithm.keep_sampling_mask": True, "rollout.accept": "match",
    })  # fmt: skip
    assert line_of(schema().validate, config) == (
        "distill.estimator must be full where distill.teacher is set and "
        "algorithm.keep_sampling_mask is True (the teacher is not truncated), got 'score'"
    )
    said = schema().without_effect(small_config(), "distill.coef")
    assert said == (
        "distill.coef has no effect with distill.teacher = ''; add --config.distill.teacher=MODEL"
    )

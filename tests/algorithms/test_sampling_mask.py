"""Updates on truncated samples, against the enumeration of all responses of a tiny vocabulary."""

import dataclasses
import itertools
import math
import signal

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import special
from small_models import random_params
from small_runs import assert_same_run, interrupt, records, saved, small_config
from update_reference import LEARNER, distance, on_mesh, pack

from specrl_jax import train as loop
from specrl_jax.algorithms.losses import LossConfig
from specrl_jax.algorithms.scoring import logprobs
from specrl_jax.algorithms.update import update
from specrl_jax.algorithms.update_spec import init_policy_state
from specrl_jax.models import transformer
from specrl_jax.models.config import ModelConfig
from specrl_jax.models.transformer import Transformer
from specrl_jax.sharding import put
from specrl_jax.telemetry.metrics import MetricsLog
from specrl_jax.types import Batch

MODEL = ModelConfig(
    vocab_size=6, embed_dim=8, mlp_dim=12, num_layers=1, num_heads=2, num_kv_heads=1, head_dim=4
)
PROMPT = (4, 1)
LONGEST = 3  # tokens of a response
END = 0  # ends it
TEMPERATURE = 0.8
# Responses that may follow a token, by length.
CONTEXTS = [list(itertools.product(range(1, 6), repeat=n)) for n in range(LONGEST)]
INDEX = {context: i for i, context in enumerate(itertools.chain(*CONTEXTS))}
# Without a clip; a token's loss is divided by rows and longest length alone.
LOSS = LossConfig(
    aggregation="constant",
    max_response_len=LONGEST,
    clip_low=1.0,
    clip_high=1e6,
    importance_cap=1e9,
)


@jax.jit
def context_logits(params) -> jax.Array:
    """Tempered logits [contexts, V] after the prompt and each context."""
    model = Transformer(MODEL, params)
    results = []
    for contexts in CONTEXTS:
        tokens = jnp.array([PROMPT + context for context in contexts])
        logits = model.logits(model(jax.sharding.reshard(tokens, jax.P(("data", "fsdp"))))[0])
        results.append(jax.sharding.reshard(logits, jax.P(None, None, None))[:, -1])
    return jnp.concatenate(results) / TEMPERATURE


def place(weights: dict):
    return transformer.place_params(MODEL, weights)


def logits_of(weights: dict) -> np.ndarray:
    return np.asarray(context_logits(place(weights)), np.float64)


def make_weights(shift: float = 0.0, seed: int = 1) -> dict:
    first, other = random_params(MODEL, 0.6), random_params(MODEL, 0.6, seed=seed)
    return jax.tree.map(lambda x, y: x + np.float32(shift) * y, first, other)


class World:
    """All responses of a truncated policy, with probability and reward."""

    def __init__(self, weights: dict, top_k: int, top_p: float = 1.0):
        self.support = []
        self.logits = logits_of(weights)
        for logits in self.logits:
            order = np.argsort(-logits)[:top_k]
            before = np.cumsum(special.softmax(logits[order]))[:-1]
            self.support.append(order[: np.sum(before < top_p) + 1].tolist())
        self.allowed = np.array([[x in ids for x in range(6)] for ids in self.support])
        rows = [()]
        for _ in range(LONGEST):
            rows = [
                (*row, *more)
                for row in rows
                for more in ([()] if END in row else [(x,) for x in self.support[INDEX[row]]])
            ]
        self.responses = rows
        self.rewards = np.random.default_rng(3).normal(size=len(rows))
        self.lens = np.array([len(row) for row in rows])
        self.tokens = np.array([row + (0,) * (LONGEST - len(row)) for row in rows])
        self.contexts = np.array(
            [[INDEX[row[: min(i, len(row) - 1)]] for i in range(LONGEST)] for row in rows]
        )
        self.mask = np.arange(LONGEST) < self.lens[:, None]
        self.probs = np.exp(np.sum(self.scores(self.table(self.logits)), axis=1))

    def table(self, logits, whole: bool = False):
        """Log-probs [contexts, V] among the sampler's tokens, or among all; not those of others."""
        weights = jnp.where(self.allowed | whole, jnp.exp(logits), 0)
        return logits - jnp.log(jnp.sum(weights, axis=1, keepdims=True))

    def scores(self, table):
        """Log-probs [rows, R] of the responses' tokens; 0 after them."""
        return jnp.where(self.mask, table[self.contexts, self.tokens], 0)

    def batch(self, whole: bool = False) -> Batch:
        """Every response once; its weight is its probability."""
        rows = len(self.responses)
        support = np.full((rows, LONGEST, 4), -1, np.int32)
        for i, column in zip(*np.nonzero(self.mask)):
            ids = self.support[self.contexts[i, column]]
            support[i, column, : len(ids)] = ids
        prompts = np.tile(np.array(PROMPT), (rows, 1))
        columns = lambda x: np.tile(np.float32(x)[:, None], (1, LONGEST))  # noqa: E731
        return Batch(
            tokens=np.concatenate([prompts, self.tokens], axis=1).astype(np.int32),
            prompt_lens=np.full(rows, len(PROMPT), np.int32),
            response_lens=self.lens.astype(np.int32),
            old_logprobs=np.float32(self.scores(self.table(self.logits, whole))),
            advantages=columns(self.rewards),
            importance_weights=columns(self.probs * rows * LONGEST),
            support=None if whole else support,
        )

    def update(self, weights: dict, batch: Batch, reference: dict | None = None, **changes):
        """Gradient and sums of an update of the weights on the batch."""
        loss = dataclasses.replace(LOSS, **changes)
        spec = dataclasses.replace(LEARNER, model=MODEL, loss=loss, temperature=TEMPERATURE)
        batch, rows = on_mesh(batch), range(len(self.responses))
        packed = pack(batch, spec, rows)
        if reference is not None:
            ref_logprobs = logprobs(spec, place(reference), packed, batch.support)
            batch = dataclasses.replace(batch, ref_logprobs=ref_logprobs)
        state, sums = update(spec, init_policy_state(spec, place(weights)), batch, packed)
        return state.policy.opt_state, sums


def differentiate(weights: dict, function):
    """Value of `function(logits)`, and its gradient by the weights, in float64 by the logits."""
    logits, pull = jax.vjp(context_logits, place(weights))
    with jax.enable_x64(True):
        value, slope = jax.value_and_grad(function)(np.asarray(logits, np.float64))
    assert slope.dtype == np.float64
    return value, pull(put(np.asarray(slope, np.float32), None, None))[0]


@pytest.mark.parametrize(("top_k", "top_p"), [(2, 1.0), (4, 0.7)])
def test_the_expected_gradient_is_that_of_the_expected_reward(mesh, top_k, top_p):
    """Σ_y π_S(y)·r(y)·∇ log π_S(y) = ∇ Σ_y π_S(y)·r(y). Log-probs among all tokens miss it."""
    weights = make_weights()
    world = World(weights, top_k, top_p)
    assert world.probs.sum() == pytest.approx(1)

    def loss(logits):
        probs = jnp.exp(jnp.sum(world.scores(world.table(logits)), axis=1))
        return -jnp.sum(world.rewards * probs)

    _, want = differentiate(weights, loss)
    got, sums = world.update(weights, world.batch())
    assert distance(got, want) <= 1e-5
    assert sums["logprob_gap"] / sums["tokens"] < 1e-6
    whole, _ = world.update(weights, world.batch(whole=True))
    assert distance(whole, want) > 0.1


def test_a_later_update_and_the_penalty_take_the_same_tokens(mesh):
    """Weights have moved since the rollout. All policies are among the rollout's tokens:

    Σ_y π_old(y) Σ_t (−r(y)·π(y_t) / π_old(y_t) + β·KL(π ‖ π_ref)), contexts fixed
    """
    world = World(make_weights(), 3)
    now = make_weights(shift=0.1)
    reference = make_weights(shift=0.3, seed=2)
    old = np.asarray(world.scores(world.table(world.logits)))
    log_q = np.asarray(world.table(logits_of(reference)))

    def loss(logits):
        log_p = world.table(logits)
        terms = jnp.where(world.allowed, jnp.exp(log_p) * (log_p - log_q), 0)
        ratios = jnp.exp(world.scores(log_p) - old)
        per_token = 0.3 * terms.sum(-1)[world.contexts] - world.rewards[:, None] * ratios
        return jnp.sum(world.probs[:, None] * jnp.where(world.mask, per_token, 0))

    value, want = differentiate(now, loss)
    got, sums = world.update(now, world.batch(), reference, kl_coef=0.3)
    assert distance(got, want) <= 1e-5
    np.testing.assert_allclose(sums["loss"], value, rtol=1e-5)


# Runs -----------------------------------------------------------------------------------------

TRUNCATED = {
    "rollout.top_k": 4, "rollout.top_p": 0.9, "algorithm.keep_sampling_mask": True,
    "updates.skip_no_signal": False, "updates.mini_batch_size": 32,
}  # fmt: skip


@pytest.fixture
def train(mesh, tmp_path):
    """train(NAME, changes) → the work directory of a small run."""

    def run(name: str, changes: dict):
        loop.train(small_config(TRUNCATED | changes), tmp_path / name)
        return tmp_path / name

    return run


def test_the_update_scores_what_the_rollout_sampled_or_kept(train):
    """Drafts are kept whatever the policy prefers: some have left its likeliest tokens."""
    changes = {"rollout.lenience": math.inf}
    workdir = train("lenient", changes | {"updates.learning_rate": 0.1})
    steps = records(workdir)[1:]
    assert all(x["policy/rollout_train_logprob_gap"] < 1e-5 for x in steps)
    assert steps[-1]["rollout/reuse_fraction"] == 1
    assert np.min(saved(workdir, 4)["store.tokens.sampling_logprobs"]) == -50


@pytest.mark.slow
def test_drafts_change_nothing(train):
    match = {"rollout.accept": "match", "rollout.noise_epochs": 2}
    drafted = train("drafted", match)
    plain = train("plain", {"rollout.noise_epochs": 2, "rollout.draft": "none"})
    assert records(drafted)[-1]["rollout/reuse_fraction"] > 0
    mine, theirs = saved(drafted, 4), saved(plain, 4)
    np.testing.assert_array_equal(mine["store.tokens.ids"], theirs["store.tokens.ids"])
    for name in (x for x in mine if x.startswith("train.policy.params")):
        np.testing.assert_allclose(mine[name], theirs[name], rtol=1e-3, atol=1e-5)


@pytest.mark.slow
def test_rows_that_wait_keep_their_tokens(train, monkeypatch):
    """A run whose unfinished rows wait in its checkpoint resumes as if it had not stopped."""
    changes = {
        "rollout.partial": 2, "rollout.draft": "none", "updates.packing": "sequences",
    }  # fmt: skip
    whole = train("whole", changes)
    with monkeypatch.context() as patch:
        patch.setattr(MetricsLog, "write", MetricsLog.write)  # put back after interrupt
        interrupt(MetricsLog, "write", 2, signal.SIGTERM)
        assert len(records(train("cut", changes))) == 3
    assert_same_run(train("cut", changes), whole, 4)
    assert sum(x["rollout/tokens_resumed"] for x in records(whole)[1:]) > 0

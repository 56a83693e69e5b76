"""The draft head learns to predict the policy; the policy is unaffected."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import update_reference as ref

from specrl_jax.algorithms.draft_training import count_tokens
from specrl_jax.algorithms.update import update
from specrl_jax.algorithms.update_spec import DraftHeadTraining, init_policy_state
from specrl_jax.models.draft_head import DraftHead, take_frequent
from specrl_jax.models.transformer import Transformer
from specrl_jax.sharding import put

OVERLAPS = (0.4, 0.1)  # of an update before, by draft token: λ is exp(-1.2), exp(-0.3)


def learner(vocab=0, **changes):
    training = DraftHeadTraining(ref.GRADIENT, len(OVERLAPS), vocab)
    return dataclasses.replace(ref.LEARNER, draft_head=training, **changes)


def begin(update_spec):
    """The state before an update whose head has moved away from its first parameters."""
    state = init_policy_state(update_spec, ref.place_params())
    head = state.draft_head
    rng = np.random.default_rng(5)

    def nudge(x):
        noise = jnp.asarray(rng.normal(0, 0.2, x.shape), jnp.float32)
        return x + jax.sharding.reshard(noise, jax.typeof(x).sharding.spec)

    params = jax.tree.map(nudge, head.params)
    counts = None
    if head.counts is not None:
        counts = put(np.arange(ref.MODEL.vocab_size, dtype=np.int32) % 5, None)
    overlap = put(np.float32(OVERLAPS), None)
    head = dataclasses.replace(head, params=params, counts=counts, overlap=overlap)
    return state.replace(draft_head=head)


def plain_loss(head_params, params, batch, ids):
    """The loss and Σ min(p, q) a token, [depth], by rows that are computed one by one."""
    model = Transformer(ref.MODEL, params)
    head = DraftHead(ref.MODEL, head_params)
    total = 0.0
    overlap = [0.0] * len(OVERLAPS)
    for row in range(ref.ROWS):
        first, count = batch.prompt_lens[row], batch.response_lens[row]
        tokens = jnp.asarray(batch.tokens[row, : first + count])[None]
        states = hidden = model(tokens)[0]
        log_p = log_probs(model, hidden, ids)[first - 1 : -1]
        for depth, before in enumerate(OVERLAPS):
            states = jnp.concatenate([states[:, :1], states[:, :-1]], axis=1)
            positions = jnp.arange(first + count)[None]
            states, _ = head(states, model.lookup(tokens), positions_BT=positions)
            log_q = log_probs(model, states, ids)[first - 1 : -1]
            kl = jnp.sum(jnp.exp(log_p) * (log_p - log_q))
            tv = jnp.sum(jnp.abs(jnp.exp(log_p) - jnp.exp(log_q))) / 2
            weight = np.exp(-3 * before)
            total += weight * kl + (1 - weight) * tv
            overlap[depth] += count - jax.lax.stop_gradient(tv)
    tokens = batch.response_lens.sum()
    return total / tokens / len(OVERLAPS), jnp.stack(overlap) / tokens


def log_probs(model, states, ids):
    """[T, n] over these tokens."""
    logits = jax.sharding.reshard(model.logits(states), jax.P(None, None, None))
    return jax.nn.log_softmax(logits[0][:, ids] / ref.LEARNER.temperature)


@pytest.mark.parametrize(("vocab", "chunk"), [(0, 100), (5, ref.TWO_ROWS)])
def test_the_gradient_is_that_of_rows_alone(mesh, vocab, chunk):
    """Rows 2 and 3 share all but their last token: their trie is computed once."""
    update_spec = learner(vocab, logits_chunk=100 if vocab == 0 else ref.LEARNER.logits_chunk)
    batch = ref.host_batch(shared=True)
    state = begin(update_spec)
    head = state.draft_head
    # 4, 9 and 3, 8 come most often in `begin`; of 2 and 7 the first is taken.
    ids = np.array([2, 3, 4, 8, 9]) if vocab else np.arange(ref.MODEL.vocab_size)
    value = jax.value_and_grad(plain_loss, has_aux=True)
    (loss, overlap), want = jax.jit(functools.partial(value, batch=batch, ids=ids))(
        head.params, state.policy.params
    )
    packed = ref.pack(batch, update_spec, chunk=chunk)
    after, sums = update(update_spec, state, ref.on_mesh(batch), packed)
    assert ref.distance(after.draft_head.opt_state, want) <= 2e-6
    np.testing.assert_allclose(sums["head_loss"], loss, rtol=1e-5)
    np.testing.assert_allclose(after.draft_head.overlap, overlap, rtol=1e-5)
    assert sums["head_tokens"] == batch.response_lens.sum()


def test_the_policy_learns_bit_for_bit_the_same(mesh):
    """As a user's compiler takes it: which operations become one follows from the whole program."""
    optimizer = optax.adamw(1e-2)
    training = DraftHeadTraining(optimizer, 1, 0)
    batch = ref.on_mesh(ref.host_batch(shared=True))
    states = []
    for draft_head in (None, training):
        spec = dataclasses.replace(ref.LEARNER, optimizer=optimizer, draft_head=draft_head)
        state = init_policy_state(spec, ref.place_params())
        packed = ref.pack(batch, spec)
        program = update.lower(spec, state, batch, packed)
        step = program.compile({"xla_cpu_use_fusion_emitters": True})
        for _ in range(3):
            state, _ = step(state, batch, packed)
        states.append(state)
    for name in ("params", "opt_state"):
        one, other = (getattr(state.policy, name) for state in states)
        jax.tree.map(np.testing.assert_array_equal, one, other)
    assert states[1].draft_head.overlap[0] > 0


def test_the_head_comes_to_say_what_the_policy_says(mesh):
    training = DraftHeadTraining(optax.adam(1e-2), 2, 0)
    spec = dataclasses.replace(ref.LEARNER, optimizer=optax.sgd(0.0), draft_head=training)
    batch = ref.on_mesh(ref.host_batch())
    packed = ref.pack(batch, spec)
    state = init_policy_state(spec, ref.place_params())
    overlaps = []
    for _ in range(100):
        state, _ = update(spec, state, batch, packed)
        overlaps.append(np.asarray(state.draft_head.overlap))
    assert np.all(overlaps[0] < 0.85)
    assert np.all(overlaps[-1] > 0.95)


def test_tokens_are_counted_and_the_most_frequent_taken(mesh):
    counts = put(np.array([0, -1, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0], np.int32), None)  # 1 is unused
    tokens = np.array([[7, 7, 3, 9], [7, 3, 11, 11]], np.int32)
    mask = np.array([[1, 1, 1, 0], [1, 1, 0, 0]], bool)
    counts = count_tokens(counts, put(tokens, "batch", None), put(mask, "batch", None))
    assert np.asarray(counts).tolist() == [0, -1, 0, 2, 0, 0, 0, 3, 0, 0, 0, 0]
    output = put(np.arange(24, dtype=np.float32).reshape(12, 2), "vocab", None)
    ids, rows = take_frequent(output, counts, 4)
    assert np.asarray(ids).tolist() == [0, 2, 3, 7]
    np.testing.assert_array_equal(rows, [[0, 1], [4, 5], [6, 7], [14, 15]])

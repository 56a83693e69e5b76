"""The supervised stage that gives a policy from nothing something to improve.

Maximum likelihood on demonstrations, answers only. It is part of the job, runs before step 1 and
is a pure function of the configuration.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array

from specrl_jax.algorithms.learner import Learner, TrainState
from specrl_jax.algorithms.masked import masked_mean
from specrl_jax.algorithms.scoring import pack, score
from specrl_jax.data.prompts import Dataset, demonstrations, load_warmup_examples
from specrl_jax.data.tokenizer import Tokenizer
from specrl_jax.models.transformer import Params
from specrl_jax.sharding import put, take_rows

_CHUNK = 50  # steps per compiled call


def warm_up(
    config, learner: Learner, params: Params, tokenizer: Tokenizer, dataset: Dataset
) -> Params:
    """The stage that `config.warmup` asks for; prints the loss as it goes."""
    settings, slots = config.warmup, (config.data.prompt_len, config.rollout.response_len)
    examples = load_warmup_examples(config, settings.examples, dataset)
    pairs = [
        (tokenizer.encode_prompt(prompt), [*tokenizer.encode(answer), tokenizer.eos_ids[0]])
        for prompt, answer in demonstrations(examples, settings.mistake_rate, config.seed)
    ]
    pairs = [(p, a) for p, a in pairs if len(p) <= slots[0] and len(a) <= slots[1]]
    if not pairs:
        raise ValueError(
            f"rollout.response_len must hold the demonstrations' answers, got {slots[1]}"
        )
    print(
        f"warm-up: {settings.steps} supervised steps of {settings.batch_size} on {len(pairs)} "
        f"demonstrations, {settings.mistake_rate:.0%} of their digits wrong",
        flush=True,
    )
    return supervise(
        learner,
        params,
        *_padded([p for p, _ in pairs], slots[0], tokenizer.pad_id),
        *_padded([a for _, a in pairs], slots[1], tokenizer.pad_id),
        steps=settings.steps,
        batch_size=settings.batch_size,
        learning_rate=settings.learning_rate,
        seed=config.seed,
        report=lambda step, loss: print(f"  step {step}: {loss:.3f} nats/token", flush=True),
    )


def supervise(
    learner: Learner,
    params: Params,
    prompts: np.ndarray,
    prompt_lens: np.ndarray,
    responses: np.ndarray,
    response_lens: np.ndarray,
    *,
    steps: int,
    batch_size: int,
    learning_rate: float,
    seed: int,
    report=None,
) -> Params:
    """Train `params` for `steps` on N demonstrations; returns the new parameters.

    prompts: int32 [N, P], responses: int32 [N, R] with their end of sequence, both right-padded;
    lens: int32 [N]. report(step, loss) is called every 50 steps; loss in nats per token.
    """
    schedule = optax.cosine_decay_schedule(learning_rate, steps, alpha=0.1)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule))
    slots = responses.shape[1]
    data = tuple(put(x, None) for x in (prompt_lens, response_lens))
    data = (put(prompts, None, None), data[0], put(responses, None, None), data[1])
    state = TrainState.create(params, optimizer)
    rng = np.random.default_rng([seed, steps])
    order = np.concatenate(
        [rng.permutation(len(prompts)) for _ in range(-(-steps * batch_size // len(prompts)))]
    )
    order = order[: steps * batch_size].reshape(steps, batch_size).astype(np.int32)
    for start in range(0, steps, _CHUNK):
        state, losses = _run(learner, optimizer, slots, state, data, order[start : start + _CHUNK])
        if report is not None:
            report(min(start + _CHUNK, steps), float(losses[-1]))
    return state.params


@functools.partial(jax.jit, static_argnums=(0, 1, 2), donate_argnums=3)
def _run(
    learner: Learner,
    optimizer: optax.GradientTransformation,
    slots: int,
    state: TrainState,
    data: tuple[Array, Array, Array, Array],
    order: Array,
) -> tuple[TrainState, Array]:
    def step(state: TrainState, index: Array) -> tuple[TrainState, Array]:
        rows = [take_rows(x, index, *(None,) * (x.ndim - 1)) for x in data]
        prompts, prompt_lens, responses, response_lens = rows
        tokens = pack(prompts, prompt_lens, responses, response_slots=slots)
        mask = jnp.arange(slots)[None, :] < response_lens[:, None]

        def loss(params: Params) -> Array:
            scores = score(learner, params, None, tokens, prompt_lens, slots)
            return -masked_mean(scores.logprobs, mask)

        value, grads = jax.value_and_grad(loss)(state.params)
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        return TrainState(optax.apply_updates(state.params, updates), opt_state), value

    return jax.lax.scan(step, state, order)


def _padded(rows: list[list[int]], width: int, pad_id: int) -> tuple[np.ndarray, np.ndarray]:
    """int32 [N, width] and lens [N]."""
    tokens = np.full((len(rows), width), pad_id, np.int32)
    for i, row in enumerate(rows):
        tokens[i, : len(row)] = row
    return tokens, np.array([len(row) for row in rows], np.int32)

"""The supervised stage before step 1: maximum likelihood on the answers of demonstrations.

It gives a policy from nothing something to improve, and is a pure function of the configuration.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array

from specrl_jax import hosts
from specrl_jax.algorithms.masked import masked_mean
from specrl_jax.algorithms.scoring import read_nodes, score, unpacked
from specrl_jax.algorithms.update import join
from specrl_jax.algorithms.update_spec import PolicyState, UpdateSpec
from specrl_jax.data.prompts import Dataset, demonstrations, load_warmup_examples, right_padded
from specrl_jax.data.tokenizer import Tokenizer
from specrl_jax.models.lora import adapted
from specrl_jax.models.transformer import Params
from specrl_jax.sharding import put, take_rows

_CHUNK = 50  # steps per compiled call


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Demonstrations:
    """N prompts with their answers, right-padded."""

    prompts: np.ndarray | Array  # int32 [N, P]
    prompt_lens: np.ndarray | Array  # int32 [N]
    responses: np.ndarray | Array  # int32 [N, R], end of sequence included
    response_lens: np.ndarray | Array  # int32 [N]


def warm_up(
    config,
    update_spec: UpdateSpec,
    params: Params,
    tokenizer: Tokenizer,
    dataset: Dataset,
    frozen: Params | None = None,
) -> Params:
    """Run the stage that `config.warmup` asks for, and print the loss as it goes.

    Returns `params`, trained. frozen: where they are adapters, the weights that they belong to.
    """
    settings = config.warmup
    slots = (config.data.prompt_len, config.rollout.response_len)
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
    data = Demonstrations(
        *right_padded([p for p, _ in pairs], slots[0], tokenizer.pad_id),
        *right_padded([a for _, a in pairs], slots[1], tokenizer.pad_id),
    )
    return supervise(update_spec, params, data, settings, config.seed, frozen)


def supervise(
    update_spec: UpdateSpec,
    params: Params,
    data: Demonstrations,
    settings,
    seed: int,
    frozen: Params | None = None,
) -> Params:
    """Train `params` for `settings.steps` on the demonstrations; returns the new parameters.

    settings: `config.warmup`, of which steps, batch_size and learning_rate are read. Raises
    FloatingPointError where the loss or the weights are not finite.
    """
    steps = settings.steps
    size = settings.batch_size
    total = len(data.prompts)
    schedule = optax.cosine_decay_schedule(settings.learning_rate, steps, alpha=0.1)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule))
    data = jax.tree.map(lambda x: put(x, *(None,) * x.ndim), data)
    state = PolicyState.create(params, optimizer)
    rng = np.random.default_rng([seed, steps])
    order = np.concatenate([rng.permutation(total) for _ in range(-(-steps * size // total))])
    order = order[: steps * size].reshape(steps, size).astype(np.int32)
    for start in range(0, steps, _CHUNK):
        part = order[start : start + _CHUNK]
        state, figures = _run(update_spec, optimizer, state, data, part, frozen)
        losses, weight_norm = hosts.fetch(figures)
        step = min(start + _CHUNK, steps)
        for name, value in (("loss", losses.sum()), ("weight_norm", weight_norm)):
            if not np.isfinite(value):
                raise FloatingPointError(
                    f"warm-up: {name} is {value} by step {step}; lower warmup.learning_rate, "
                    f"now {settings.learning_rate}"
                )
        print(f"  step {step}: {losses[-1]:.3f} nats/token", flush=True)
    return state.params


@functools.partial(jax.jit, static_argnums=(0, 1), donate_argnums=2)
def _run(
    update_spec: UpdateSpec,
    optimizer: optax.GradientTransformation,
    state: PolicyState,
    data: Demonstrations,
    order: Array,
    frozen: Params | None,
) -> tuple[PolicyState, tuple[Array, Array]]:
    """The new state; the losses of the steps, and the norm of the weights after them."""
    slots = data.responses.shape[1]

    def step(state: PolicyState, index: Array) -> tuple[PolicyState, Array]:
        rows = take_rows(data, index)
        tokens = join(rows.prompts, rows.prompt_lens, rows.responses)
        sequences, nodes = unpacked(tokens, rows.prompt_lens, slots)
        mask = jnp.arange(slots)[None, :] < rows.response_lens[:, None]

        def loss(params: Params) -> Array:
            policy = adapted(update_spec.model, params, frozen)
            scores = read_nodes(score(update_spec, policy, None, sequences), nodes)
            return -masked_mean(scores.logprobs, mask)

        value, grads = jax.value_and_grad(loss)(state.params)
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        return PolicyState(optax.apply_updates(state.params, updates), opt_state), value

    state, losses = jax.lax.scan(step, state, order)
    return state, (losses, optax.tree.norm(state.params))

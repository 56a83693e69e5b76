"""The supervised stage before step 1: maximum likelihood on solutions or demonstrations.

It gives a policy something to improve, and is a pure function of the configuration and the data.
"""

import dataclasses
import functools
import operator

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array

from specrl_jax import hosts
from specrl_jax.algorithms.draft_training import apply_gradients, count_tokens, head_gradients
from specrl_jax.algorithms.masked import masked_mean
from specrl_jax.algorithms.scoring import read_nodes, score, unpacked
from specrl_jax.algorithms.update import join
from specrl_jax.algorithms.update_spec import (
    DraftHeadState,
    PolicyState,
    UpdateSpec,
    init_head_state,
)
from specrl_jax.data.prompts import (
    Dataset,
    demonstrations,
    digest,
    encode_response,
    load_warmup_examples,
    right_padded,
)
from specrl_jax.data.tokenizer import Tokenizer
from specrl_jax.models.lora import adapted
from specrl_jax.models.transformer import Params
from specrl_jax.sharding import put

_CALLS = 12  # at most, of a compiled function, each of as many steps


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
) -> tuple[Params, DraftHeadState | None]:
    """Run the stage that `config.warmup` asks for, and print the loss as it goes.

    Returns `params`, trained, and the draft head, where there is to be one. frozen: where `params`
    are adapters, the weights that they belong to.
    """
    settings = config.warmup
    slots = (config.data.prompt_len, config.rollout.response_len)
    examples = load_warmup_examples(config, settings.examples, dataset)
    field = config.data.solution_field
    texts = demonstrations(examples, settings.mistake_rate, config.seed, field)
    pairs = [(tokenizer.encode_prompt(p), encode_response(a, tokenizer)) for p, a in texts]
    pairs = [(p, a) for p, a in pairs if len(p) <= slots[0] and 0 < len(a) <= slots[1]]
    if not texts:
        raise ValueError(
            f"data.solution_field must name a column with solutions, got {field!r}: none of "
            f"{len(examples)} problems has one"
        )
    if not pairs:
        raise ValueError(
            f"rollout.response_len must hold the demonstrations' answers, got {slots[1]}"
        )
    rate = settings.mistake_rate
    flawed = f", {rate:.0%} of their digits wrong" if rate else ""
    print(
        f"warm-up: {settings.steps} supervised steps of {settings.batch_size} on {len(pairs)} "
        f"demonstrations{flawed}; {len(examples) - len(texts)} without a solution and "
        f"{len(texts) - len(pairs)} too long left out",
        flush=True,
    )
    data = Demonstrations(
        *right_padded([p for p, _ in pairs], slots[0], tokenizer.pad_id),
        *right_padded([a for _, a in pairs], slots[1], tokenizer.pad_id),
    )
    read = {"the demonstrations": digest(*jax.tree.leaves(data))}
    hosts.check_same(read, "give them the same files")
    return supervise(update_spec, params, data, settings, config.seed, frozen)


def supervise(
    update_spec: UpdateSpec,
    params: Params,
    data: Demonstrations,
    settings,
    seed: int,
    frozen: Params | None = None,
) -> tuple[Params, DraftHeadState | None]:
    """Train `params` for `settings.steps` on the demonstrations; returns the new parameters, and
    the draft head that was trained beside them.

    settings: `config.warmup`, of which steps, batch_size and learning_rate are read. Raises
    FloatingPointError where the loss or the weights are not finite.
    """
    steps = settings.steps
    size = settings.batch_size
    total = len(data.prompts)
    schedule = optax.cosine_decay_schedule(settings.learning_rate, steps, alpha=0.1)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule))
    state = PolicyState.create(params, optimizer)
    if update_spec.draft_head is not None:
        policy = adapted(update_spec.model, params, frozen)
        draft_head = init_head_state(update_spec, policy)
        state = dataclasses.replace(state, draft_head=draft_head)
    rng = np.random.default_rng([seed, steps])
    order = np.concatenate([rng.permutation(total) for _ in range(-(-steps * size // total))])
    order = order[: steps * size].reshape(steps, size)
    calls = max(n for n in range(1, _CALLS + 1) if steps % n == 0)
    chunk = steps // calls  # all of one shape: one program
    for start in range(0, steps, chunk):
        # Only the batches of these steps, so that no shape depends on the number of examples.
        index = order[start : start + chunk]
        chosen = jax.tree.map(operator.itemgetter(index), data)
        batches = jax.tree.map(lambda x: put(x, None, "batch", *(None,) * (x.ndim - 2)), chosen)
        state, figures = _run(update_spec, optimizer, state, batches, frozen)
        losses, weight_norm, head_norm = hosts.fetch(figures)
        step = min(start + chunk, steps)
        if not np.isfinite(head_norm):
            raise FloatingPointError(
                f"warm-up: the draft head's weight_norm is {head_norm} by step {step}; lower "
                "rollout.head.learning_rate"
            )
        for name, value in (("loss", losses.sum()), ("weight_norm", weight_norm)):
            if not np.isfinite(value):
                raise FloatingPointError(
                    f"warm-up: {name} is {value} by step {step}; lower warmup.learning_rate, "
                    f"now {settings.learning_rate}"
                )
        print(f"  step {step}: {losses[-1]:.3f} nats/token", flush=True)
    return state.params, state.draft_head


@functools.partial(jax.jit, static_argnums=(0, 1), donate_argnums=2)
def _run(
    update_spec: UpdateSpec,
    optimizer: optax.GradientTransformation,
    state: PolicyState,
    batches: Demonstrations,
    frozen: Params | None,
) -> tuple[PolicyState, tuple[Array, Array, Array]]:
    """The new state; the losses of the steps, and the norms of the weights after them, the policy's
    and the draft head's.

    batches: arrays [steps, batch, ...].
    """
    slots = batches.responses.shape[-1]

    def step(state: PolicyState, rows: Demonstrations) -> tuple[PolicyState, Array]:
        tokens = join(rows.prompts, rows.prompt_lens, rows.responses)
        sequences, nodes = unpacked(tokens, rows.prompt_lens, slots)
        mask = jnp.arange(slots)[None, :] < rows.response_lens[:, None]

        def loss(params: Params) -> tuple[Array, Array]:
            policy = adapted(update_spec.model, params, frozen)
            scores, states = score(update_spec, policy, None, sequences)
            return -masked_mean(read_nodes(scores, nodes).logprobs, mask), states

        (value, states), grads = jax.value_and_grad(loss, has_aux=True)(state.params)
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        head = state.draft_head
        if head is not None:
            if head.counts is not None:
                counts = count_tokens(head.counts, rows.responses, mask)
                head = dataclasses.replace(head, counts=counts)
            policy = adapted(update_spec.model, state.params, frozen)
            inputs = (sequences, states, nodes, mask, jnp.sum(mask))
            grads, sums = head_gradients(update_spec, head, policy, *inputs)
            head = apply_gradients(update_spec, head, grads, sums)
        params = optax.apply_updates(state.params, updates)
        return PolicyState(params, opt_state, draft_head=head), value

    state, losses = jax.lax.scan(step, state, batches)
    head = state.draft_head
    head_norm = 0.0 if head is None else optax.tree.norm(head.params)
    return state, (losses, optax.tree.norm(state.params), head_norm)

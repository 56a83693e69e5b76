"""Supervised stage before step 1: maximum likelihood on solutions or demonstrations.

The result is a pure function of the configuration and the data.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import Array

from specrl_jax import hosts
from specrl_jax.algorithms.draft_training import count_tokens
from specrl_jax.algorithms.losses import LossConfig
from specrl_jax.algorithms.scoring import RowTokens, unpacked
from specrl_jax.algorithms.update import Scalars, update
from specrl_jax.algorithms.update_spec import (
    DraftHeadState,
    PolicyState,
    UpdateSpec,
    init_policy_state,
)
from specrl_jax.data.prompts import (
    Dataset,
    demonstrations,
    digest,
    encode_response,
    load_warmup_examples,
    right_padded,
)
from specrl_jax.models.row_slices import gather_tokens
from specrl_jax.models.transformer import Params
from specrl_jax.sharding import put
from specrl_jax.text.tokenizer import Tokenizer
from specrl_jax.types import Batch

_CALLS = 12  # most calls of the compiled function; all calls run the same number of steps
# Scalar of an update → the field to lower if it is not finite.
_MUST_BE_FINITE = {
    "head_weight_norm": "rollout.head.learning_rate",
    "loss": "sft.learning_rate",
    "weight_norm": "sft.learning_rate",
}


def warm_up(
    config,
    update_spec: UpdateSpec,
    params: Params,
    tokenizer: Tokenizer,
    dataset: Dataset,
    base_params: Params | None = None,
) -> tuple[Params, DraftHeadState | None]:
    """Run the stage that `config.sft` configures, printing the loss along the way.

    base_params: if `params` are adapters, the weights that they modify.

    Returns the trained `params`, and the draft head; None if the run has no head.
    """
    settings = config.sft
    prompt_len = config.data.prompt_len
    response_len = config.rollout.response_len
    examples = load_warmup_examples(config, settings.examples, dataset)
    field = config.data.solution_field
    texts = demonstrations(examples, settings.mistake_rate, config.seed, field)
    pairs = [(tokenizer.encode_prompt(p), encode_response(a, tokenizer)) for p, a in texts]
    pairs = [(p, a) for p, a in pairs if len(p) <= prompt_len and 0 < len(a) <= response_len]
    if not texts:
        raise ValueError(
            f"data.solution_field must name a column with solutions, got {field!r}: none of "
            f"{len(examples)} problems has one"
        )
    if not pairs:
        raise ValueError(
            f"rollout.response_len must fit the demonstrations' answers, got {response_len}"
        )
    rate = settings.mistake_rate
    flawed = f", {rate:.0%} of their digits wrong" if rate else ""
    print(
        f"warm-up: {settings.steps} supervised steps of {settings.batch_size} on {len(pairs)} "
        f"demonstrations{flawed}; left out: {len(examples) - len(texts)} without a solution and "
        f"{len(texts) - len(pairs)} too long",
        flush=True,
    )
    rows = [[*p, *a] for p, a in pairs]
    tokens, lens = right_padded(rows, prompt_len + response_len, tokenizer.pad_id)
    prompt_lens = np.array([len(p) for p, _ in pairs], np.int32)
    data = RowTokens(tokens, prompt_lens, lens - prompt_lens, response_len)
    fingerprint = {"the demonstrations": digest(*data[:3])}
    hosts.check_same(fingerprint, "give them the same files")
    return supervise(update_spec, params, data, settings, config.seed, base_params)


def supervise(
    update_spec: UpdateSpec,
    params: Params,
    data: RowTokens,
    settings,
    seed: int,
    base_params: Params | None = None,
) -> tuple[Params, DraftHeadState | None]:
    """Train `params` on the demonstrations; return the trained `params` and the draft head.

    settings: `config.sft`; only steps, batch_size and learning_rate are used.

    Raises FloatingPointError if the loss or the weights are not finite.
    """
    steps = settings.steps
    size = settings.batch_size
    total = len(data.tokens)
    schedule = optax.cosine_decay_schedule(settings.learning_rate, steps, alpha=0.1)
    update_spec = dataclasses.replace(
        update_spec,
        loss=LossConfig(max_response_len=data.slots),
        optimizer=optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule)),
        critic=None,
        loss_count=0,
        skip_nonfinite=False,
    )
    state = init_policy_state(update_spec, params, base_params)
    rng = np.random.default_rng([seed, steps])
    order = np.concatenate([rng.permutation(total) for _ in range(-(-steps * size // total))])
    order = order[: steps * size].reshape(steps, size)
    calls = max(n for n in range(1, _CALLS + 1) if steps % n == 0)
    chunk = steps // calls  # steps per call: one shape, so one program
    for start in range(0, steps, chunk):
        # Only the batches of these steps, so that no shape depends on the number of examples.
        index = order[start : start + chunk]
        batches = tuple(put(x[index], None, "batch", *(None,) * (x.ndim - 1)) for x in data[:3])
        state, scalars = _run(update_spec, state, batches, base_params)
        scalars = hosts.fetch(scalars)
        step = min(start + chunk, steps)
        for name, field in _MUST_BE_FINITE.items():
            value = scalars.get(name, np.zeros(1)).sum()
            if not np.isfinite(value):
                rate = f", now {settings.learning_rate}" if field.startswith("sft.") else ""
                raise FloatingPointError(
                    f"warm-up: {name} is {value} by step {step}; lower {field}{rate}"
                )
        print(f"  step {step}: {scalars['loss'][-1]:.3f} nats/token", flush=True)
    return state.policy.params, state.draft_head


@functools.partial(jax.jit, static_argnums=0, donate_argnums=1)
def _run(
    update_spec: UpdateSpec,
    state: PolicyState,
    batches: tuple[Array, Array, Array],
    base_params: Params | None,
) -> tuple[PolicyState, Scalars]:
    """Return the state after an update on each batch, and the updates' scalars, [steps].

    batches: `RowTokens.tokens`, `prompt_lens` and `response_lens`, [steps, B, ...].
    """
    slots = update_spec.loss.max_response_len

    def step(state: PolicyState, rows: tuple[Array, Array, Array]) -> tuple[PolicyState, Scalars]:
        tokens, prompt_lens, response_lens = rows
        columns = prompt_lens[:, None] + jnp.arange(slots)[None, :]
        nothing = jnp.zeros_like(columns, jnp.float32)
        weights = jnp.ones_like(response_lens, jnp.float32)
        batch = Batch(tokens, prompt_lens, response_lens, nothing, nothing, supervised=weights)
        if state.draft_head is not None and state.draft_head.counts is not None:
            responses = gather_tokens(tokens, columns)
            counts = count_tokens(state.draft_head.counts, responses, batch.mask)
            head = dataclasses.replace(state.draft_head, counts=counts)
            state = state.replace(draft_head=head)
        return update(update_spec, state, batch, unpacked(tokens, prompt_lens, slots), base_params)

    return jax.lax.scan(step, state, batches)

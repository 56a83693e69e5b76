"""How much more likely training makes the very responses that it was trained on.

A prefix rule is exact only for a draft that does not depend on the current weights, and last
epoch's drafts were trained on since (arXiv 2509.23232 does so; the exact rules of `acceptance`
too). So: responses of one policy, to training prompts, which the next update learns from, and to
held-out prompts, which no update sees; the mean of log π / π_old per token on either, under the
policy of the next evaluation. The first less the second is what the choice of drafts owes to
training on them, 0 for independent drafts.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from specrl_jax.algorithms.learner import Learner
from specrl_jax.algorithms.masked import masked_mean
from specrl_jax.algorithms.scoring import logprobs, micro_batches
from specrl_jax.models.transformer import Params
from specrl_jax.sharding import put, spec
from specrl_jax.types import Batch

METRICS = ("selection/trained", "selection/held_out", "selection/gap")


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Sampled:
    """Responses of a policy. drawn: bool [B, R], tokens that it drew itself; logprobs: [B, R] nats
    under it; the rest as in `Batch`."""

    tokens: Array
    prompt_lens: Array
    response_lens: Array
    logprobs: Array
    drawn: Array

    @classmethod
    def empty(cls, rows: int, prompt_slots: int, response_slots: int) -> "Sampled":
        def zeros(dtype, *rest: int) -> Array:
            axes = spec("batch", *(None,) * len(rest))
            return jnp.zeros((rows, *rest), dtype, out_sharding=axes)

        ones = put(np.ones(rows, np.int32), "batch")
        return cls(
            zeros(jnp.int32, prompt_slots + response_slots), ones, zeros(jnp.int32),
            zeros(jnp.float32, response_slots), zeros(bool, response_slots),
        )  # fmt: skip

    @classmethod
    def of(cls, batch: Batch, drawn: Array) -> "Sampled":
        """Of a batch with all response slots; drawn: bool [B, R] or [B, 1]."""
        parts = (batch.tokens, batch.prompt_lens, batch.response_lens, batch.old_logprobs)
        return cls(*parts, batch.mask & drawn)


@dataclasses.dataclass(frozen=True)
class Selection:
    """What the next evaluation compares. step: the one whose policy sampled both, -1 for none yet;
    complete: the training batch is there too."""

    held_out: Sampled
    trained: Sampled
    step: int = -1
    complete: bool = False

    def gap(self, learner: Learner, params: Params, micro_batch_size: int) -> dict[str, float]:
        """The `selection/*` metrics under the policy `params`; nothing before there is both."""
        if not self.complete:
            return {}
        trained, held_out = (
            float(_log_ratio(learner, params, x, micro_batch_size))
            for x in (self.trained, self.held_out)
        )
        return dict(zip(METRICS, (trained, held_out, trained - held_out), strict=True))


def _log_ratio(learner: Learner, params: Params, one: Sampled, micro_batch_size: int) -> Array:
    batch = Batch(one.tokens, one.prompt_lens, one.response_lens, one.logprobs, one.logprobs)
    rows = one.response_lens.shape[0]
    size = micro_batch_size if micro_batch_size and rows % micro_batch_size == 0 else rows
    now = logprobs(learner, params, batch, micro_batches(rows, size))
    return masked_mean(now - one.logprobs, one.drawn)

"""On-policy distillation: a teacher scores the student's own tokens (arXiv 2306.13649).

The loss of a context is c·KL(π ‖ π_T), from the student to the teacher, at the rollout's
temperature. Contexts count as sampled: a token's effect on later ones has no gradient.

    full     Σ_v π(v)·(log π(v) − log π_T(v)), over the whole vocabulary; the teacher runs in each
             update, and its logits are in memory with the student's
    score    r·d with the gradient r·d·∇log π(y), d = log π(y) − log π_T(y),  r = π(y) / π_old(y);
             the teacher runs once a step, and one number per token is kept

The mean of the second over y ~ π_old is the first, and so is the mean of its gradient. A token's
`score` has its importance weight; `full` is exact at each context and needs none. By default there
is only the teacher's loss, as in TRL, SkyRL and Tinker; `distill.reward_weight` scales advantages
from rewards, which are added.

Worked example: π = (0.5, 0.5) and π_T = (0.8, 0.2) have d = (−0.470, 0.916) and KL 0.223. The
gradient with respect to the first logit is −0.347 in both: 0.5·(−0.470 − 0.223).

    python launch/train.py --config=configs/grpo.py:micro --config.distill.teacher=EXPORTED
"""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from specrl_jax.algorithms.losses import LossConfig, k3, kl_penalty
from specrl_jax.algorithms.scoring import hidden_states, logprobs, with_model
from specrl_jax.algorithms.terms import FrozenModel, LossTerm, TokenValues
from specrl_jax.config.fields import NEW_RUN, Check, Section, Values, When, field
from specrl_jax.config.kinds import FINITE, TEXT, WEIGHT, choice
from specrl_jax.models.config import ModelConfig
from specrl_jax.models.load import load_policy, load_shape
from specrl_jax.models.row_slices import gather_tokens
from specrl_jax.models.transformer import (
    Params,
    Transformer,
    compute_head,
    final_logits,
    head_logits,
)
from specrl_jax.packing import Sequences
from specrl_jax.text.tokenizer import HuggingFaceTokenizer, Tokenizer
from specrl_jax.training.stage import Stage, StageResult
from specrl_jax.training.stages import pack_all
from specrl_jax.types import Batch, Rollout

FIELD = "distill.teacher"


def full_kl(logits: Array, teacher_logits: Array) -> Array:
    """Return KL(π ‖ π_T) in nats [...] of softmax(logits) [..., V]; carries the gradient.

    A token that the student cannot sample (logit -inf) counts as 0.
    """
    logprobs = jax.nn.log_softmax(logits)
    teacher = jax.nn.log_softmax(jax.lax.stop_gradient(teacher_logits))
    possible = logits > -jnp.inf
    gap = jnp.where(possible, logprobs, 0.0) - jnp.where(possible, teacher, 0.0)
    return jnp.sum(jnp.exp(logprobs) * gap, axis=-1)


def score_kl(logprobs: Array, teacher_logprobs: Array, log_ratio: Array) -> Array:
    """Return r·d [...] of sampled tokens, with the gradient r·d·∇log π(y).

    logprobs, teacher_logprobs: log π(y) and log π_T(y). log_ratio: log r.
    """
    return kl_penalty("k1+", teacher_logprobs - logprobs, log_ratio)


# Terms of the loss --------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class TeacherKl(LossTerm):
    """Distance to the teacher, times a coefficient."""

    coef: float
    teacher: ModelConfig
    temperature: float


class FullKl(TeacherKl):
    """c·KL(π ‖ π_T) of each context, from the logits of both."""

    scores_tokens = False  # the stage does that

    def token_inputs(self, frozen: Params, sequences: Sequences, columns: Mapping) -> Array:
        """Return the teacher's states before each token, [m, T, D]."""
        states = hidden_states(Transformer(self.teacher, frozen), sequences)
        return gather_tokens(states, sequences.parents)

    def shared(self, frozen: Params) -> Array:
        """Return the teacher's head in the compute type."""
        return compute_head(Transformer(self.teacher, frozen).head, self.teacher.dtype)

    def read(self, logits: Array, inputs: Array, shared: Array) -> Array:
        teacher = final_logits(head_logits(inputs, shared), self.teacher) / self.temperature
        return full_kl(logits, _as_wide(teacher, logits.shape[-1]))

    def per_token(self, values: TokenValues, config: LossConfig) -> tuple[Array, dict[str, Array]]:
        kl = jnp.where(values.batch.mask, values.read, 0.0)
        return self.coef * kl, {"policy/teacher_kl": kl}


class ScoreKl(TeacherKl):
    """c·r·d of each token, from the log-probs of the sampled tokens."""

    scores_tokens = True

    def per_token(self, values: TokenValues, config: LossConfig) -> tuple[Array, dict[str, Array]]:
        teacher = jnp.where(values.batch.mask, values.batch.extra["teacher_logprobs"], 0.0)
        term = self.coef * score_kl(values.logprobs, teacher, values.log_ratio)
        if values.weights is not None:
            term = jax.lax.stop_gradient(values.weights) * term
        return term, {"policy/teacher_kl": k3(teacher - values.policies.current)}


def _as_wide(logits: Array, size: int) -> Array:
    """Return logits of `size` tokens: vocabularies are padded to different sizes."""
    missing = size - logits.shape[-1]
    if missing == 0:
        return logits
    if missing < 0:
        return logits[..., :size]
    padding = [(0, 0)] * (logits.ndim - 1) + [(0, missing)]
    return jnp.pad(logits, padding, constant_values=-jnp.inf)


ESTIMATORS = {"full": FullKl, "score": ScoreKl}


class Distillation(LossTerm):
    """Makes the term selected by `distill.estimator`."""

    @staticmethod
    def asked_by(config) -> str:
        return "distill.teacher" if config.distill.teacher else ""

    @staticmethod
    def from_config(config, frozen: ModelConfig) -> LossTerm:
        estimator = ESTIMATORS[config.distill.estimator]
        return estimator(config.distill.coef, frozen, config.rollout.temperature)


# The teacher --------------------------------------------------------------------------------------


class Teacher(FrozenModel):
    """Weights from `distill.teacher`, read like those of `model.source`."""

    @staticmethod
    def asked_by(config) -> str:
        return Distillation.asked_by(config)

    @staticmethod
    def scores_tokens(config) -> bool:
        return ESTIMATORS[config.distill.estimator].scores_tokens

    @staticmethod
    def load(config, tokenizer: Tokenizer) -> tuple[ModelConfig, Params]:
        """Return the teacher's shape and float32 weights; ValueError if its tokens differ."""
        source = config.distill.teacher
        check_tokens(source, tokenizer)
        return load_policy(
            _as_policy(config), tokenizer.vocab_size, tokenizer.unused_ids, field=FIELD
        )

    @staticmethod
    def shape(config, vocab_size: int) -> ModelConfig:
        return load_shape(_as_policy(config), vocab_size, field=FIELD)


def _as_policy(config) -> Any:
    """Return a configuration with the teacher as its policy."""
    config = config.copy_and_resolve_references()
    config.model.source = config.distill.teacher
    config.model.remat = False  # nothing is backpropagated through it
    config.lora.rank = 0
    return config


def check_tokens(source: str, tokenizer: Tokenizer) -> None:
    """Raise a one-line ValueError if a model's tokenizer lacks any of the policy's tokens."""
    theirs = HuggingFaceTokenizer(source, False, FIELD).vocab
    for token, index in sorted(tokenizer.vocab.items(), key=lambda pair: pair[1]):
        if theirs.get(token) != index:
            there = {x: name for name, x in theirs.items()}.get(index)
            raise ValueError(
                f"distill.teacher must have the policy's tokens, got {source!r}, whose token "
                f"{index} is {there!r} where the policy's is {token!r}"
            )


class Scores(Stage):
    """Log-probs of the tokens under the teacher, if the term reads them; scales advantages."""

    @staticmethod
    def asked_by(config) -> str:
        return Distillation.asked_by(config)

    @staticmethod
    def shapes(config, rollout: Rollout, batch: Batch) -> Batch:
        if not Teacher.scores_tokens(config):
            return batch
        columns = {"teacher_logprobs": batch.old_logprobs}
        return dataclasses.replace(batch, extra=batch.extra | columns)

    def __call__(self, run, state, batch: Batch, collected) -> StageResult:
        weight = run.config.distill.reward_weight
        if weight != 1:
            batch = dataclasses.replace(batch, advantages=weight * batch.advantages)
        if Teacher.scores_tokens(run.config):
            spec = with_model(run.update_spec, run.frozen.model)
            scored = logprobs(spec, run.frozen.params, pack_all(run, batch))
            columns = {"teacher_logprobs": scored}
            batch = dataclasses.replace(batch, extra=batch.extra | columns)
        return StageResult(batch)


FROZEN = Teacher
LOSS_TERM = Distillation
STAGE = Scores
METRICS = {"policy/teacher_kl": ("KL of the policy to the teacher per token", "nats")}
TAUGHT = When("distill.teacher", lambda c: c.distill.teacher, "MODEL")
# fmt: off
SECTIONS = (Section("distill", "a teacher scores the policy's own tokens", (
    field("teacher", "", '"": none | directory | .gguf | pypi:WHEEL | hub id, with the same tokens',
          TEXT),
    field("coef", 1.0, "weight of the KL from the policy to the teacher", WEIGHT,
          may_change=NEW_RUN),
    field("estimator", "full", "full (sum over the vocabulary) | score (of the sampled token)",
          choice(lambda: ESTIMATORS), may_change=NEW_RUN),
    field("reward_weight", 0.0, "factor of advantages from rewards; 0: teacher only", FINITE,
          neutral=0.0, may_change=NEW_RUN),
), on=TAUGHT),)
# fmt: on


def _rules(config: Values) -> Iterator[Check]:
    if not config.distill.teacher:
        return
    where = "where distill.teacher is set"
    rule = f"another one {where} (a teacher teaches tokens, not pairs)"
    yield "algorithm.objective", rule, config.meaning("algorithm.objective").by_token
    scores = config.meaning("distill.estimator").scores_tokens
    rule = f"full {where} and algorithm.keep_sampling_mask is True (the teacher is not truncated)"
    yield "distill.estimator", rule, not (scores and config.algorithm.keep_sampling_mask)


RULES = (_rules,)

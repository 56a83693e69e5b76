"""Fields of the update: advantage, objective, critic, and the optimizer's steps.

"paper" is SPEC-RL's published run (arXiv 2509.23232), here and in the other `settings.py`.
"""

from collections.abc import Iterator
from typing import Any

from specrl_jax.config.fields import NEW_RUN, Check, Section, Shards, Values, When, field
from specrl_jax.config.kinds import (
    BELOW_ONE,
    BETA,
    FINITE,
    OFF_OR_ABOVE_ONE,
    SHARE,
    SWITCH,
    WEIGHT,
    choice,
    integer,
    within,
)


def _advantages():
    from specrl_jax.algorithms import advantages

    return advantages


def _losses():
    from specrl_jax.algorithms import losses

    return losses


def _old_logprobs():
    from specrl_jax.algorithms.corrections import OLD_LOGPROBS

    return OLD_LOGPROBS


def _row_selections():
    from specrl_jax.algorithms.update_spec import ROW_SELECTIONS

    return ROW_SELECTIONS


def _schedules():
    from specrl_jax.algorithms.update_spec import SCHEDULES

    return SCHEDULES


def _critic_kinds():
    from specrl_jax.models.transformer import CRITIC_KINDS

    return CRITIC_KINDS


def _packings():
    from specrl_jax.packing import PACKINGS

    return PACKINGS


def _old(config: Values) -> Any:
    return config.meaning("updates.old_logprobs")


def _advantage(config: Values) -> Any:
    return _advantages().choose_advantage(config)


def _objective_of(config: Values) -> Any:
    return config.meaning("algorithm.objective")


def _has_critic(config: Values) -> bool:
    return _advantages().has_critic(config.critic.kind)


BY_GROUP = When("critic.kind", lambda c: not _advantage(c).needs_critic, "none")
DUAL_CLIP = When("algorithm.objective", lambda c: _objective_of(c).dual_clip)
TOP_K = When("rollout.top_k", lambda c: c.rollout.top_k > 0, "20")
BY_TOKEN = When("algorithm.objective", lambda c: _objective_of(c).by_token)
KL = When("algorithm.kl_coef", lambda c: c.algorithm.kl_coef > 0, "0.001")
RATIO = When("updates.old_logprobs", lambda c: not _old(c).one_update)
WEIGHTED_DRAFTS = When(
    "rollout.draft", lambda c: _old(c).by_update or c.meaning("rollout.draft").verifies_previous
)
WEIGHTED_RULE = When(
    "rollout.accept",
    lambda c: _old(c).by_update or c.meaning("rollout.accept").importance_weight is not None,
)
HAS_CRITIC = When("critic.kind", _has_critic)
NO_CRITIC = When("critic.kind", lambda c: not _has_critic(c), "none")
NO_KL = When(
    "algorithm.kl_coef", lambda c: not (c.algorithm.kl_coef and _objective_of(c).by_token), "0"
)
NO_ENTROPY = When("algorithm.entropy_coef", lambda c: not c.algorithm.entropy_coef, "0")


# fmt: off
ALGORITHM = Section("algorithm", "", (
    field("advantage", "auto", "group | gae (with a critic) | auto (gae or group)",
          choice(lambda: _advantages().ADVANTAGES, "auto")),
    field("normalize_std", True,
          "divide advantages by the group's std; False: Dr. GRPO; paper True", SWITCH,
          BY_GROUP, BY_TOKEN),
    field("leave_one_out", False,
          "RLOO: the baseline is the mean reward of the group's other responses", SWITCH,
          BY_GROUP, BY_TOKEN, neutral=False),
    field("objective", "clip", "clip (PPO's) | cispo (the ratio weighs log π)",
          choice(lambda: _losses().OBJECTIVES)),
    field("ratio", "token", "token | sequence (one per response, the geometric mean: GSPO)",
          choice(lambda: _losses().RATIOS), BY_TOKEN, RATIO),
    field("clip_low", 0.2, "the ratio π / π_old is clipped below 1 - clip_low; paper 0.2",
          SHARE, BY_TOKEN, RATIO, may_change=NEW_RUN),
    field("clip_high", 0.28, "the ratio is clipped above 1 + clip_high; paper 0.2 (DAPO 0.28)",
          within(0, 1e6), BY_TOKEN, RATIO, may_change=NEW_RUN),
    field("dual_clip", 3.0,
          "c: a token's loss is at most c·|A| if its advantage A < 0; 0: off; paper 3",
          OFF_OR_ABOVE_ONE, DUAL_CLIP, RATIO, neutral=0.0, may_change=NEW_RUN),
    field("aggregation", "token", "token | sequence (mean of row means) | constant (Dr. GRPO)",
          choice(lambda: _losses().AGGREGATIONS)),
    field("kl_coef", 0.0, "weight of KL(π ‖ policy before step 1) in the loss; 0: off; paper 1e-4",
          WEIGHT, may_change=NEW_RUN),
    field("kl_estimator", "k3+", "of the loss: k3+ | k1+ | k2, with the same gradient; paper k3",
          choice(lambda: _losses().KL_ESTIMATORS), KL, BY_TOKEN, may_change=NEW_RUN),
    field("entropy_coef", 0.0, "weight of the entropy bonus; paper 0", FINITE, may_change=NEW_RUN),
    field("balance_coef", 0.0, "weight of a mixture of experts' load-balancing loss (2101.03961)",
          WEIGHT, may_change=NEW_RUN),
    field("importance_cap", 0.0,
          "TIS: largest importance weight of a token; 0: no importance weights",
          within(0, 1e6), WEIGHTED_DRAFTS, WEIGHTED_RULE, neutral=0.0),
    field("keep_sampling_mask", False,
          "compute log-probs over the tokens that rollout.top_k allowed",
          SWITCH, TOP_K, neutral=False),
))

MASK = Section("algorithm.mask", "tokens without gradient; r is π_train / π_rollout; 0: off", (
    field("token_low", 0.0, "mask each token whose r is below this; IcePop 0.5",
          BELOW_ONE),
    field("token_high", 0.0, "mask each token whose r is above this; IcePop 5", OFF_OR_ABOVE_ONE),
    field("row_low", 0.0, "mask a response whose geometric mean of r is below this; SkyRL 0.99",
          BELOW_ONE),
    field("row_high", 0.0, "mask a response whose geometric mean of r is above this; SkyRL 1.01",
          OFF_OR_ABOVE_ONE),
    field("outlier_low", 0.0, "mask a response with any r below this; SkyRL 1e-4", BELOW_ONE),
    field("outlier_high", 0.0, "mask a response with any r above this; SkyRL 100",
          OFF_OR_ABOVE_ONE),
    field("negative_kl", 0.0,
          "mask tokens of advantage < 0 in a row whose mean -log r is above this; DeepSeek-V3.2",
          WEIGHT),
    field("binary_kl", 0.0,
          "mask a token if KL(p ‖ q) or KL(q ‖ p) of it against all others is above; KPop 0.1",
          WEIGHT),
    field("truncated", False,
          "mask responses cut by the length limit; their rewards still count", SWITCH,
          BY_TOKEN, neutral=False),
), may_change=NEW_RUN)

CRITIC = Section("critic", "a value function, for PPO: see configs/ppo.py", (
    field("kind", "none", "none (compare a group's rewards) | head (on the policy) | network",
          choice(_critic_kinds, "none")),
    field("learning_rate", 1e-3,
          "of the critic's AdamW, constant; the rest as in updates; paper 1e-5", WEIGHT,
          may_change=NEW_RUN),
    field("lr_warmup_steps", 0, "optimizer steps of linear warmup; paper 0", integer(), neutral=0,
          may_change=NEW_RUN),
    field("critic_only_steps", 0, "number of first steps that train only the critic; paper 0",
          integer(), neutral=0, may_change=NEW_RUN),
    field("coef", 0.5, "weight of the critic's loss; with kind=head it also trains the policy",
          within(1e-6, 1e6), may_change=NEW_RUN),
    field("clip", 0.2, "a value is clipped to the old value ± this; 0: off",
          within(0, 1e6), may_change=NEW_RUN),
    field("gamma", 1.0, "discount per token; paper 1", SHARE),
    field("gae_lambda", 1.0, "GAE's λ; paper 1", SHARE),
), on=HAS_CRITIC)

UPDATES = Section("updates", "", (
    field("mini_batch_size", 256, "rows per optimizer step; paper 256 prompts", integer(1),
          shards=Shards("update")),
    field("micro_batch_size", 0,
          "rows whose activations are kept at once, to save memory; 0: no bound",
          integer()),
    field("logits_chunk", 512, "tokens of a row whose logits are in memory at once", integer(1)),
    field("packing", "trie", "trie (prefixes once) | sequences (rows in a line) | rows (padded)",
          choice(_packings)),
    field("skip_no_signal", True,
          "skip rows whose loss has no gradient; they still count in the mean",
          SWITCH, NO_CRITIC, NO_KL, NO_ENTROPY, neutral=False),
    field("select", "all", "all rows", choice(_row_selections)),
    field("passes", 1, "passes over each rollout; paper 1", integer(1)),
    field("learning_rate", 3e-4, "of the policy's AdamW; paper 5e-7", WEIGHT),
    field("lr_schedule", "linear", "constant | linear | cosine (to 0 over the run); paper constant",
          choice(_schedules)),
    field("lr_warmup_steps", 16, "optimizer steps of linear warmup; paper 0", integer()),
    field("weight_decay", 0.01, "of AdamW; paper 0.01", WEIGHT),
    field("beta1", 0.9, "AdamW's decay of the first moment", BETA),
    field("beta2", 0.999, "AdamW's decay of the second moment", BETA),
    field("epsilon", 1e-8, "added to the root of AdamW's second moment", within(1e-20, 1)),
    field("clip_norm", 1.0,
          "largest global gradient norm; larger gradients are scaled; 0: off; paper 1.0",
          within(0, 1e6)),
    field("skip_nonfinite", 0,
          "consecutive updates with NaN or inf to skip before the run fails; 0: none", integer()),
    field("replay_routing", False, "route tokens of a mixture as the rollout did (R3, 2510.11370)",
          SWITCH),
    field("old_logprobs", "rollout", "rollout | recompute (one more pass) | current (ratio 1)",
          choice(_old_logprobs)),
), may_change=NEW_RUN)
# fmt: on


def _groups(config: Values) -> Iterator[Check]:
    compares = _advantage(config).min_group_size > 1
    rule = ">= 2 where critic.kind is none (responses of a group are compared)"
    yield "rollout.group_size", rule, not compares or config.rollout.group_size >= 2
    yield from _advantage(config).rules(config)


def _objective(config: Values) -> Iterator[Check]:
    """Yield which advantages an objective takes, and its own rules."""
    objective = _objective_of(config)
    where = f"where algorithm.objective is {config.algorithm.objective}"
    name = config.algorithm.advantage
    needs = objective.advantage
    owned = {other.advantage for other in _losses().OBJECTIVES.values()}
    rule = f"another one than {name} {where}"
    yield "algorithm.advantage", rule, name == needs or name not in owned
    yield "algorithm.advantage", f"{needs} {where}", not needs or name == needs
    yield from objective.rules(config)


def _importance_weight(config: Values) -> Iterator[Check]:
    accept = config.meaning("rollout.accept")
    verifies = config.meaning("rollout.draft").verifies_previous
    rule = (
        f"0 where rollout.accept is {config.rollout.accept} (it is not exact and has no importance "
        "weight)"
    )
    weighted = accept.exact or accept.importance_weight is not None
    cap = config.algorithm.importance_cap
    yield "algorithm.importance_cap", rule, weighted or not (cap and verifies)


RULES = (
    _groups,
    _objective,
    _importance_weight,
)
RENAMED = {
    "critic.schedule_warmup": "critic.lr_warmup_steps",
    "critic.warmup_steps": "critic.critic_only_steps",
    "updates.schedule": "updates.lr_schedule",
    "updates.schedule_warmup": "updates.lr_warmup_steps",
}

"""Rules that each field of a configuration keeps by itself: its kind and its bounds.

`RULES` has every field that is not a choice of `config.CHOICES`: the rules that it must keep, each
in words and as a test. Integers are bounded by what counts them; `config` bounds their products by
the memory that they take.
"""

import math
from collections.abc import Callable, Iterator
from typing import Any

MAX_INT = 2**31 - 1
MAX_FLOAT = 3.4e38

Rule = tuple[str, Callable[[Any], bool]]


def _within(low: float, high: float) -> Rule:
    return f"in [{low:g}, {high:g}]", lambda x: low <= x <= high


# (least, most, why no more, fields)
_INTEGERS: list[tuple[int, int, str, str]] = [
    (0, MAX_INT, "int32", """
        seed lora.rank data.prompts data.eval_prompts rollout.top_k rollout.head.vocab
        rollout.max_rows
        rollout.store_prompts rollout.store_age rollout.partial reward.overlong_tokens
        critic.schedule_warmup critic.warmup_steps updates.micro_batch_size updates.schedule_warmup
        warmup.examples updates.skip_nonfinite train.epochs train.steps warmup.steps evaluate.every
        checkpoint.keep_best log.print_every
    """),
    (1, MAX_INT, "int32", """
        data.prompt_len reward.memory_mib rollout.prompts_per_step rollout.group_size
        rollout.response_len rollout.stored_logprobs rollout.tree.history
        rollout.logits_chunk rollout.noise_epochs algorithm.max_gen_batches environment.max_turns
        curriculum.screening updates.mini_batch_size updates.passes warmup.batch_size
        evaluate.samples evaluate.batch_size checkpoint.every model.embed_dim
        model.mlp_dim model.num_heads model.num_kv_heads model.head_dim
    """),
    (2, MAX_INT, "int32", "checkpoint.keep_last"),
    (0, 4096, "processes", "reward.workers"),
    (1, 4096, "a loop over them is compiled", "model.num_layers"),
    (1, 4096, "tokens of one step, for each of which there is a cache slot", """
        rollout.max_width rollout.tree.depth
    """),
    (1, 32, "each is half of the last", "rollout.row_buckets"),
    (1, 16, "each is a pass of the head in the update's program", "rollout.head.depth"),
    (-1, MAX_INT, "int32", "mesh.data mesh.fsdp mesh.tensor"),
]  # fmt: skip

# (rule in words, test, fields)
_NUMBERS: list[tuple[str, Callable[[float], bool], str]] = [
    (">= 0", lambda x: x >= 0, "rollout.lenience"),
    (">= 0 and finite", lambda x: 0 <= x <= MAX_FLOAT, """
        algorithm.kl_coef algorithm.solution_coef critic.learning_rate updates.learning_rate
        updates.weight_decay warmup.learning_rate rollout.head.learning_rate
    """),
    ("finite", lambda x: -MAX_FLOAT <= x <= MAX_FLOAT, """
        algorithm.entropy_coef curriculum.low curriculum.high
    """),
    (*_within(0.01, 100), "rollout.temperature"),
    ("0 (greedy) or in [0.01, 100]", lambda x: x == 0 or 0.01 <= x <= 100, """
        evaluate.temperature
    """),
    (*_within(0.01, 86_400), "reward.timeout"),
    (*_within(1e-6, 1e6), """
        lora.alpha critic.coef curriculum.width
    """),
    (*_within(0, 1e6), """
        reward.threshold reward.overlong_penalty rollout.tree.factor algorithm.clip_high
        algorithm.importance_cap critic.clip updates.clip_norm
    """),
    (*_within(-1e6, 1e6), "rollout.tree.offset"),
    (*_within(1, 1e6), "curriculum.candidates"),
    (*_within(1, 1e12), "model.rope_theta"),
    (*_within(1e-20, 1), "updates.epsilon"),  # smaller ones vanish beside a float32
    ("0 (off) or in (1, 1e6]", lambda x: x == 0 or 1 < x <= 1e6, "algorithm.dual_clip"),
    ("in (0, 1]", lambda x: 0 < x <= 1, "rollout.top_p rollout.tree.decay"),
    ("in [0, 1)", lambda x: 0 <= x < 1, "environment.allow_unfinished"),
    # Nearer to 1 a float32 is 1.
    (*_within(0, 0.99999), "updates.beta1 updates.beta2"),
    (*_within(0, 1), """
        rollout.draft_refresh rollout.refresh_unsolved rollout.noise_refresh rollout.tree.min_prob
        algorithm.clip_low critic.gamma critic.gae_lambda curriculum.target curriculum.decay
        warmup.mistake_rate log.rollouts
    """),
]  # fmt: skip

_TEXTS = """
    model.source lora.targets tokenizer.source tokenizer.alphabet tokenizer.system_prompt data.name
    data.path data.eval_path data.render data.prompt_field data.answer_field data.answer_pattern
    data.solution_field data.instruction data.split data.eval_split reward.name reward.format
    reward.extract reward.thought_tags environment.name curriculum.difficulty
"""
_SWITCHES = """
    model.tie_embeddings model.remat tokenizer.chat tokenizer.continue_final_message
    reward.keep_special_tokens rollout.adaptive rollout.run_ahead
    algorithm.normalize_std algorithm.leave_one_out algorithm.dynamic_sampling
    curriculum.reuse_screening updates.skip_no_signal log.report
"""

_TEXT: Rule = ("text", lambda x: isinstance(x, str))
_SWITCH: Rule = ("True or False", lambda x: isinstance(x, bool))
_NUMBER: Rule = (
    "a number",
    lambda x: isinstance(x, int | float) and not isinstance(x, bool) and not math.isnan(x),
)
_INTEGER: Rule = ("an integer", lambda x: isinstance(x, int) and not isinstance(x, bool))


def _rules() -> Iterator[tuple[str, list[Rule]]]:
    for fields, kind in ((_TEXTS, _TEXT), (_SWITCHES, _SWITCH)):
        yield from ((field, [kind]) for field in fields.split())
    for rule, test, fields in _NUMBERS:
        yield from ((field, [_NUMBER, (rule, test)]) for field in fields.split())
    for least, most, why, fields in _INTEGERS:
        bounds = [
            (f">= {least}", lambda x, least=least: x >= least),
            (f"<= {most} ({why})", lambda x, most=most: x <= most),
        ]
        yield from ((field, [_INTEGER, *bounds]) for field in fields.split())
    one_or_two = ("1 or 2", lambda x: x in (1, 2))
    yield "rollout.draft_age", [_INTEGER, one_or_two]


RULES: dict[str, list[Rule]] = dict(_rules())

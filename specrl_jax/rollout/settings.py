"""Fields of the rollout: how responses are sampled, and what drafts them."""

from collections.abc import Iterator
from typing import Any

from specrl_jax.config.fields import NEW_RUN, Check, Section, Shards, Values, When, field
from specrl_jax.config.kinds import (
    ABOVE_ZERO,
    NOT_NEGATIVE,
    ONE_OR_TWO,
    SHARE,
    SWITCH,
    TEXT,
    WEIGHT,
    Kind,
    choice,
    integer,
    within,
)


def _draft_sources():
    from specrl_jax.rollout.drafts.sources import DRAFT_SOURCES

    return DRAFT_SOURCES


def _acceptance_rules():
    from specrl_jax.rollout.acceptance import ACCEPTANCE_RULES

    return ACCEPTANCE_RULES


def _is_stop(value: str) -> bool:
    from specrl_jax.rollout.stop_strings import is_stop

    return is_stop(value)


def _keeps_noise(config: Values) -> bool:
    from specrl_jax.rollout.spec import acceptance_rule

    return acceptance_rule(config).samples_every_token


def _draft(config: Values) -> Any:
    return config.meaning("rollout.draft")


def _rule(config: Values) -> Any:
    return config.meaning("rollout.accept")


STRINGS = Kind((
    *TEXT.rules,
    (r'texts separated by blanks, or a JSON list like ["\n\n", "Final answer: "]', _is_stop),
))  # fmt: skip
TOKENS_OF_A_STEP = integer(1, 4096, "tokens of one step, each of which needs a cache slot")

PREVIOUS = When("rollout.draft", lambda c: _draft(c).verifies_previous)
STORED = When(
    "rollout.draft", lambda c: _draft(c).verifies_previous or _draft(c).make_source is not None
)
TREE = When("rollout.draft", lambda c: _draft(c).make_source is not None)
HEAD = When("rollout.draft", lambda c: _draft(c).head)
WIDE = When("rollout.draft", lambda c: _draft(c).proposes)
TIMED = When("rollout.draft", lambda c: WIDE.holds(c) or (PREVIOUS.holds(c) and _keeps_noise(c)))
GENERATIONS = When("rollout.tree.history", lambda c: c.rollout.tree.history > 1, "2")
LENIENT = When("rollout.accept", lambda c: _rule(c).lenience_dependent_share is not None)
DISTRIBUTION = When("rollout.accept", lambda c: _rule(c).needs_distribution)
REUSED_NOISE = When("rollout.accept", _keeps_noise)
SEVERAL_VISITS = When("rollout.noise_epochs", lambda c: c.rollout.noise_epochs > 1, "4")


# fmt: off
ROLLOUT = Section("rollout", "", (
    field("prompts_per_step", 64, "prompts sampled in a step; paper 1,024",
          integer(1), shards=Shards("rollout")),
    field("group_size", 8, "responses per prompt; paper 8", integer(1)),
    field("response_len", 24, "longest response in tokens, end token included; paper 4,096",
          integer(1)),
    field("stop", "",
          'strings that end a response or turn: </answer>, or ["\\n\\n", "Answer: "]', STRINGS),
    field("temperature", 1.0, "sampling temperature; paper 1.0", within(0.01, 100)),
    field("top_k", 0, "sample from the k likeliest tokens; 0: off; paper off", integer()),
    field("top_p", 1.0, "sample from the likeliest tokens with this total mass; 1: off; paper off",
          ABOVE_ZERO),
    field("draft", "previous", "none | previous (last response) | tree (SRT) | head | a sum: a+b",
          choice(_draft_sources)),
    field("draft_age", 1, "1: the last response, 2: the one before (paper's delayed reuse)",
          ONE_OR_TWO, PREVIOUS, neutral=1),
    field("accept", "match", "of previous drafts: match | ratio (SPEC-RL's) | block | random",
          choice(_acceptance_rules), PREVIOUS, neutral="match"),
    field("lenience", 1.0, "ℓ >= 0 of ratio: 0 no reuse, inf full reuse; paper math.exp(0.5)",
          NOT_NEGATIVE, PREVIOUS, LENIENT, neutral=1.0),
    field("noise_epochs", 4, "visits for which a sample reuses its noise (match); 1: always fresh",
          integer(1), REUSED_NOISE, neutral=1),
    field("noise_refresh", 0.0, "share of a group's samples that get fresh noise at each visit",
          SHARE, REUSED_NOISE, SEVERAL_VISITS, neutral=0.0),
    field("stored_logprobs", 16, "tokens per position whose π_old is stored; for block", integer(1),
          PREVIOUS, DISTRIBUTION),
    field("max_width", 8, "W, tokens per decode step: 1 and up to W - 1 draft tokens; tree, head",
          TOKENS_OF_A_STEP, WIDE, neutral=1),
    field("adaptive", True, "choose decode widths, and (match) whether to verify drafts, by "
          "measured seconds; False: the widest, and all drafts",
          SWITCH, TIMED, neutral=False),
    field("row_buckets", 4, "batch sizes to compact unfinished rows into, each half the previous",
          integer(1, 32, "each is half the previous")),
    field("max_rows", 0, "rows decoded at a time; others wait; 0: as many as fit the devices",
          integer()),
    field("store_prompts", 0, "prompts with stored responses, oldest evicted first; 0: all",
          integer(), STORED, neutral=0),
    field("store_age", 0, "steps after which a stored response is not used; 0: never", integer(),
          STORED, neutral=0),
))

TREE_DRAFTS = Section("rollout.tree", "suffix matches in a prompt's known responses (SRT)", (
    field("history", 2, "last responses of each sample to match, besides those being decoded",
          integer(1)),
    field("depth", 16, "a row's last tokens to look up", TOKENS_OF_A_STEP),
    field("factor", 8.0, "a draft has at most factor x matched tokens + offset; SRT 1.0",
          within(0, 1e6)),
    field("offset", 0.0, "see factor; SRT 1.0", within(-1e6, 1e6)),
    field("min_prob", 0.1, "a draft ends where its share of the continuations is smaller", SHARE),
    field("decay", 0.7, "weight of a response relative to one a generation newer", ABOVE_ZERO,
          GENERATIONS, neutral=1.0),
), on=TREE)

HEAD_DRAFTS = Section("rollout.head", "a layer trained to draft, alongside the policy", (
    field("learning_rate", 1e-3, "AdamW, constant; other values as in updates", WEIGHT,
          may_change=NEW_RUN),
    field("depth", 1,
          "draft tokens to train on, unrolled from the head's own states",
          integer(1, 16, "each is a pass of the head in the update")),
    field("vocab", 0, "restrict drafts to the N most frequent response tokens; 0: all",
          integer()),
), on=HEAD)
# fmt: on


def _drafts(config: Values) -> Iterator[Check]:
    rollout = config.rollout
    rule = f"< rollout.max_width = {rollout.max_width}, tokens of a draft and one more"
    depth = rollout.head.depth
    yield "rollout.head.depth", rule, not _draft(config).head or depth < rollout.max_width
    size = rollout.prompts_per_step
    rule = f"0 or >= rollout.prompts_per_step = {size}"
    yield "rollout.store_prompts", rule, not 0 < rollout.store_prompts < size


RULES = (_drafts,)

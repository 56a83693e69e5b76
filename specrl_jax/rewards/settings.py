"""Fields of the reward."""

from collections.abc import Iterator

from specrl_jax.config.fields import NEW_RUN, Check, Section, Values, When, field
from specrl_jax.config.kinds import SWITCH, TEXT, integer, within
from specrl_jax.inputs import reward_terms


def _reads_answer_part(config: Values) -> bool:
    from specrl_jax.rewards.scorers import reads_answer_part

    settings = config.reward
    return bool(config.environment.name) or reads_answer_part(settings.name, settings.extract)


STOP = When("rollout.stop", lambda c: c.rollout.stop, "'</answer>'")
ONE_TURN = When("environment.name", lambda c: not c.environment.name, "")
SPECIAL_TOKENS = When("tokenizer.source", lambda c: c.meaning("tokenizer.source") is None, "")
FORMAT = When("reward.name", lambda c: "format" in reward_terms(c.reward.name), "math+format")
ANSWER_PART = When("reward.name", _reads_answer_part, "math")
OVERLONG = When("reward.overlong_tokens", lambda c: c.reward.overlong_tokens > 0, "4")

# If strings are compared, time, memory and workers limit nothing. They matter all the same:
# launch/evaluate.py scores other tasks with them.


# fmt: off
REWARD = Section("reward", "", (
    field("name", "exact", "exact | math | format | code | reasoning_gym | module:function | a sum",
          TEXT, ONE_TURN),
    field("format", "", 'regex of a whole response, for format; "": <think>..</think>, then text',
          TEXT, ONE_TURN, FORMAT, neutral="", task=""),
    field("timeout", 5.0,
          "CPU seconds of one response or one step of an environment; it may wait 4 x",
          within(0.01, 86_400)),
    field("memory_mib", 1024, "MiB that one response, or one episode, may allocate", integer(1)),
    field("readable", "", "colon-separated paths that code in responses may read besides libraries",
          TEXT),
    field("workers", 0, "scoring processes; 0: one per core, at most 16",
          integer(0, 4096, "processes")),
    field("threshold", 0.0, "> 0: the reward is 1 from this score on, else 0; 0: the score itself",
          within(0, 1e6), task=0.0),
    field("overlong_tokens", 0, "DAPO: penalize the last tokens before the limit; 0: off",
          integer()),
    field("overlong_penalty", 1.0, "the total penalty for all of these tokens",
          within(0, 1e6), OVERLONG, neutral=0.0),
    field("keep_stop", True, "rewards see the rollout.stop text that ended a response", SWITCH,
          STOP, neutral=True),
    field("keep_special_tokens", False, "rewards see special tokens, except the end's", SWITCH,
          SPECIAL_TOKENS, neutral=False),
    field("thought_tags", "<think> </think> [THINK] [/THINK]", 'pairs around thoughts; "": none',
          TEXT, ANSWER_PART, neutral=""),
    field("extract", "", 'regex; group 1 of its last match is the answer; "": the whole response',
          TEXT, task=""),
), may_change=NEW_RUN)
# fmt: on


def _tasks(config: Values) -> Iterator[Check]:
    from specrl_jax.rewards.scorers import find_scorer

    data = config.data.source
    for function in reward_terms(config.reward.name):
        rule = f"another one where data.source is {data} ({function} scores only its own tasks)"
        yield "reward.name", rule, find_scorer(function).source in ("", data)


def _overlong(config: Values) -> Iterator[Check]:
    length = config.rollout.response_len
    rule = f"<= rollout.response_len = {length}"
    yield "reward.overlong_tokens", rule, config.reward.overlong_tokens <= length


RULES = (_tasks, _overlong)

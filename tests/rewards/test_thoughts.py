"""Thoughts are not answers: what follows them is scored, by every named reward."""

import dataclasses

import numpy as np
import pytest
from small_runs import line_of, small_config

from specrl_jax.data.prompts import encode_prompts, make_example
from specrl_jax.responses import Responder
from specrl_jax.rewards.thoughts import ThoughtTags
from specrl_jax.text.tokenizer import CharacterTokenizer, HuggingFaceTokenizer
from specrl_jax.training.build import make_responder

TAGS = ThoughtTags.parse("<think> </think> [THINK] [/THINK]")
PARTS = [
    # response, its answer part
    ("4", "4"),
    (" 4\n", " 4\n"),
    ("", ""),
    ("<think>3</think>4", "4"),
    ("<think>3</think> \n\n 4 \n", " 4"),
    ("<think>3</think>\n    return 4\n", "    return 4"),
    ("3</think> 4", "4"),
    ("<think>3", None),
    ("3 <think>", None),
    ("<think>3</think>4<think>5", None),
    ("<think>3</think>4</think>5", "5"),
    ("<think>1</think>2<think>3</think>4", "4"),
    ("<think>the tag <think> opens a thought</think>4", "4"),
    ("<think><answer>3</answer></think><answer>4</answer>", "<answer>4</answer>"),
    ("<think>3</think>", ""),
    ("[THINK]3[/THINK]4", "4"),
    ("[THINK]3", None),
    ("[THINK]the tag <think> is another's[/THINK]4", "4"),
    ("</thinking> 4", "</thinking> 4"),
]


@pytest.mark.parametrize(("response", "part"), PARTS)
def test_the_answer_part(response, part):
    assert TAGS.answer_part(response) == part


def test_a_prompt_may_open_the_thought():
    begun = [TAGS.answer_part(x, has_begun=True) for x in ("3</think>4", "It is 3", "<think>3")]
    assert begun == ["4", None, None]
    prompts = ["Q <think>\n", "Q [THINK]", "Q", "Put thoughts in <think>.", "<think>\n\n</think>\n"]
    assert [TAGS.has_begun(x) for x in prompts] == [True, True, False, False, False]
    assert not ThoughtTags().has_begun("<think>")


def test_tags_of_other_families():
    tags = ThoughtTags.parse(
        "<seed:think> </seed:think> <|channel|>analysis<|message|> <|channel|>final<|message|>"
    )
    assert tags.answer_part("<seed:think>3</seed:think>4") == "4"
    said = "<|channel|>analysis<|message|>3<|end|>"
    assert tags.answer_part(said) is None
    assert tags.answer_part(said + "<|channel|>final<|message|>4") == "4"
    assert tags.answer_part("<think>3") == "<think>3"
    assert ThoughtTags.parse("").answer_part("<think>3</think>4") == "<think>3</think>4"


@pytest.mark.parametrize("text", ["<think>", "<think> </think> [THINK]", "<think> <think>"])
def test_tags_that_are_no_pairs(text):
    rule = (
        'reward.thought_tags must be pairs of an opening and a closing tag, like "<think> </think>"'
    )
    assert line_of(ThoughtTags.parse, text) == f"{rule}, got {text!r}"


@pytest.mark.parametrize("extract", ["</think>(.*)", r"<\/think>\s*(.*)"])
def test_a_pattern_of_the_answer_that_asks_for_a_tag(extract):
    line = line_of(ThoughtTags.parse, "<think> </think>", extract)
    assert line.startswith("reward.extract must not contain </think>, a tag of reward.thought_tags")
    assert line.endswith(f'got {extract!r}; or set reward.thought_tags=""')
    assert ThoughtTags.parse("", extract) == ThoughtTags()


ALPHABET = "".join(map(chr, range(32, 127))) + "\n"
BOXED = r"<think>Perhaps \boxed{3}. No, 2+2 is 4.</think>" + "\nThe answer is 4."
CODE = "```python\ndef f(): return {}\n```\n"


def rewards(name, responses, answers, prompt="2+2?", **settings):
    """(rewards, rewards by function) of responses to one prompt each."""
    own = {"name": name, "extract": "", "timeout": 30.0, "workers": 1, **settings}
    config = small_config({f"reward.{field}": value for field, value in own.items()})
    tokenizer = CharacterTokenizer(ALPHABET)
    examples = [make_example(prompt, answer, "", {}) for answer in answers]
    prompts = encode_prompts(examples, tokenizer, 64)
    scorer = make_responder(config, tokenizer)
    with scorer.pool:
        problems = (answers, [""] * len(answers), [{}] * len(answers))
        in_thought = scorer.begins_thoughts(prompts)
        parts = [
            scorer.read(np.array(tokenizer.encode(response)), in_thought=begun).answer
            for response, begun in zip(responses, in_thought)
        ]
        scores = scorer.rewards(responses, *problems, parts)
    assert not scores.failed.any()
    return scores.rewards.tolist(), scores.by_function


def test_math_reads_what_follows_the_thought():
    unclosed = r"<think>It is \boxed{4}. Let me check"
    opened = BOXED.removeprefix("<think>")
    responses = [BOXED, BOXED, opened, opened, unclosed]
    assert rewards("math", responses, ["4", "3", "4", "3", "4"])[0] == [1, 0, 1, 0, 0]
    cut = unclosed.removeprefix("<think>")
    assert rewards("math", [opened, cut], ["4", "4"], "2+2?<think>\n")[0] == [1, 0]
    assert rewards("math", [BOXED], ["3"], thought_tags="")[0] == [1]


def test_the_documented_sum_pays_the_right_answer():
    right, parts = rewards("math*0.8+format*0.2", [BOXED, BOXED], ["4", "3"])
    np.testing.assert_array_equal(right, np.array([1, 0.2], np.float32))
    np.testing.assert_array_equal(parts["math"], [1, 0])
    np.testing.assert_array_equal(parts["format"], [1, 1])  # of the whole response


def test_every_named_reward_and_extract_read_what_follows_the_thought():
    responses = ["<think>3</think>\n4\n", "<think>4</think> 3", "<think>4", "4"]
    answers = ["4"] * 4
    assert rewards("exact", responses, answers)[0] == [1, 0, 0, 1]
    assert rewards("exact", responses, answers, extract=r"(\d)")[0] == [1, 0, 0, 1]
    drafted = f"<think>{CODE.format(4)}</think>"
    codes = [drafted + CODE.format(3), drafted + "I cannot.", drafted.removesuffix("</think>")]
    assert rewards("code", codes, ["assert f() == 4"] * 3)[0] == [0, 0, 0]
    codes = [f"<think>{CODE.format(3)}</think>\n{CODE.format(4)}"]
    assert rewards("code", codes, ["assert f() == 4"])[0] == [1]


def test_a_function_of_the_users_gets_the_whole_response_unless_extract_is_set():
    responses = ["<think>4", "4 <think>3</think>"]
    assert rewards("user_scorers:by_name", responses, ["4", "</think>"])[0] == [1, 1]
    responses = ["<think>3</think>it is 4", "<think>4", "4 <think>4</think>3"]
    given = rewards("user_scorers:by_name", responses, ["4"] * 3, extract="(?s)^(.+)")
    assert given[0] == [1, 0, 0]


def test_a_prefix_of_the_assistants_may_open_the_thought():
    messages = ({"role": "user", "content": "2+2?"}, {"role": "assistant", "content": "<think>So"})
    closed = (messages[0], {"role": "assistant", "content": "<think>4</think>It is"})
    tokenizer = CharacterTokenizer(ALPHABET)
    prompts = encode_prompts([make_example("So", "4", "", {})] * 2, tokenizer, 64)
    examples = tuple(make_example(prompt, "4", "", {}) for prompt in (messages, closed))
    prompts = dataclasses.replace(prompts, examples=examples)
    scorer = Responder(None, tokenizer, thought_tags=TAGS)
    assert scorer.begins_thoughts(prompts).tolist() == [True, False]
    for begun, parts in ((True, [None, "4"]), (False, ["4", "4"])):
        ids = [np.array(tokenizer.encode(text)) for text in ("4", "3</think>4")]
        assert [scorer.read(x, in_thought=begun).answer for x in ids] == parts


def test_tags_that_rewards_would_not_see(tmp_path):
    from tokenizers import AddedToken, Tokenizer, models

    backend = Tokenizer(models.WordLevel({"4": 0, "5": 1}, unk_token="4"))
    backend.add_special_tokens([AddedToken(x, special=True) for x in ("[THINK]", "</s>")])
    backend.save(str(tmp_path / "tokenizer.json"))
    tokenizer = HuggingFaceTokenizer(tmp_path / "tokenizer.json", chat=False)
    whole = {"reward.name": "exact", "reward.extract": ""}
    config = small_config(whole)
    line = line_of(make_responder, config, tokenizer)
    assert line == (
        "reward.keep_special_tokens must be True where [THINK] of reward.thought_tags is a special "
        'token, got False; or set reward.thought_tags=""'
    )
    for field, value in {"keep_special_tokens": True, "thought_tags": "", "name": "format"}.items():
        config = small_config(whole | {f"reward.{field}": value})
        make_responder(config, tokenizer).pool.close()


def test_ends_of_calls_that_tools_would_not_see(tmp_path, capsys):
    from tokenizers import AddedToken, Tokenizer, models

    backend = Tokenizer(models.WordLevel({"4": 0, "5": 1}, unk_token="4"))
    backend.add_special_tokens([AddedToken(x, special=True) for x in ("</tool_call>", "</s>")])
    backend.save(str(tmp_path / "tokenizer.json"))
    tokenizer = HuggingFaceTokenizer(tmp_path / "tokenizer.json", chat=False)
    whole = {"reward.extract": "", "environment.name": "python", "rollout.stop": "</tool_call>"}
    line = line_of(make_responder, small_config(whole), tokenizer)
    assert line == (
        "reward.keep_special_tokens must be True where </tool_call> of environment.name=python is "
        "a special token, got False"
    )
    config = small_config(whole | {"reward.keep_special_tokens": True})
    make_responder(config, tokenizer).pool.close()
    assert capsys.readouterr().out == ""

"""Data: ids are frozen, the stream resumes and covers, errors are one line."""

import json
import re

import numpy as np
import pytest
from ml_collections import ConfigDict
from prompt_streams import encoded_set, prompts_of
from small_runs import line_of, play, preset

from specrl_jax.agents.python_tool import PythonTool
from specrl_jax.agents.tool_calls import read_calls
from specrl_jax.data.prompts import (
    demonstrations,
    encode_prompts,
    encode_solutions,
    eval_batches,
    load_examples,
    load_warmup_examples,
    make_example,
    solution,
)
from specrl_jax.data.readers import READERS
from specrl_jax.text.tokenizer import CharacterTokenizer
from specrl_jax.types import Prompts

ROWS = [
    {"question": f"How much is {i} and {i}?", "answer": f"Twice {i}.\n#### {2 * i:,}"}
    for i in (7, 800, 9, 1234, 5, 6)
]


def config(source="jsonl", seed=0, **changes):
    config = preset("tiny")
    values = {"name": "doubles", "options": {}, "answer_pattern": r"####\s*(.+)"}
    values |= {"source": source, "prompts": 0, "eval_prompts": 2, "prompt_len": 64}
    config.seed, config.data = seed, ConfigDict(config.data.to_dict() | values | changes)
    return config


def sort(seed=0, **options):
    settings = {"name": "sort", "answer_pattern": "", "prompts": 40, "eval_prompts": 10}
    return config("sort", seed, **settings, options=options)


def write_jsonl(path, rows):
    path.write_text("".join(json.dumps(row) + "\n\n" for row in rows), encoding="utf-8")
    return str(path)


# --- rows to examples -----------------------------------------------------------------------------


def test_prompt_id_is_frozen():
    # Draft stores and checkpoints know prompts by it. The hash is of the JSON text itself:
    # b'["2 + 2?","4","sums"]' under blake2b with a digest of 8 bytes.
    assert make_example("2 + 2?", "4", "sums", {}).prompt_id == "c6efeddb1bc41760"
    assert make_example("2 + 2?", "4", "sums", {"any": 1}).prompt_id == "c6efeddb1bc41760"
    chat = ({"role": "user", "content": "naïve?"},)
    assert make_example(chat, "4", "sums", {}).prompt_id == "b970970e4d9e3466"
    others = [("2 + 2?", "4", "adds"), ("2 + 2?", "5", "sums"), ("2 + 2", "4", "sums")]
    assert len({make_example(*other, {}).prompt_id for other in others} | {"c6efeddb1bc41760"}) == 4


def test_duplicates_are_removed_and_counted(tmp_path):
    write_jsonl(tmp_path / "train.jsonl", [*ROWS[:3], ROWS[0], ROWS[4]])
    eval_path = write_jsonl(tmp_path / "held.jsonl", [ROWS[4], ROWS[5], ROWS[5]])
    data = load_examples(config(path=str(tmp_path / "train.jsonl"), eval_path=eval_path))
    assert [e.answer for e in data.train] == ["14", "1600", "18"]
    assert [e.answer for e in data.eval] == ["10", "12"]  # kept here, removed from training
    assert data.duplicates == 3


def rows_with_other_columns():
    """Two rows that differ in `tests` alone, once more the first, and one with a question of its
    own."""
    rows = [{"question": "a", "answer": "1", "tests": tests} for tests in ("x", "y", "x")]
    return [*rows, {"question": "b", "answer": "1", "tests": "x"}]


def ids_of(tmp_path, rows, reward="mine:f", environment=""):
    settings = config(path=write_jsonl(tmp_path / "a.jsonl", rows), answer_pattern="")
    settings.data.eval_prompts = 0
    settings.reward.name = reward
    settings.environment.name = environment
    data = load_examples(settings)
    assert len(data.train) + data.duplicates == len(rows)
    return {(e.prompt, e.metadata["tests"]): e.prompt_id for e in data.train}


def test_rows_that_differ_in_a_column_that_the_reward_reads_are_no_duplicates(tmp_path):
    rows = rows_with_other_columns()
    for names in (("mine:f",), ("math*0.8+mine:f*0.2",), ("exact", "mine:Game")):
        ids = ids_of(tmp_path, rows, *names)
        assert ids.keys() == {("a", "x"), ("a", "y"), ("b", "x")}
        assert len(set(ids.values())) == 3
        assert ids == ids_of(tmp_path, rows[::-1], *names)  # whatever their order
        assert ids["b", "x"] == make_example("b", "1", "doubles", {}).prompt_id


def test_rows_that_differ_in_a_column_that_no_reward_reads_are_duplicates(tmp_path):
    rows = rows_with_other_columns()
    for names in (("math",), ("exact*0.8+format*0.2",), ("mine:f", "guess")):
        ids = ids_of(tmp_path, rows, *names)
        assert ids == {
            (question, "x"): make_example(question, "1", "doubles", {}).prompt_id
            for question in "ab"
        }


@pytest.mark.parametrize("environment", ["", "mine:Game"])
def test_a_held_out_question_is_not_trained_on_with_other_columns(tmp_path, environment):
    rows = rows_with_other_columns()
    settings = config(
        path=write_jsonl(tmp_path / "a.jsonl", [{**rows[0], "tests": "z"}, rows[3]]),
        eval_path=write_jsonl(tmp_path / "held.jsonl", rows[:2]),
        answer_pattern="",
    )
    settings.reward.name = "mine:f"
    settings.environment.name = environment
    data = load_examples(settings)
    assert [e.prompt for e in data.train] == ["b"]
    assert [e.metadata["tests"] for e in data.eval] == ["x", "y"]


def test_splits_and_bounds(tmp_path):
    write_jsonl(tmp_path / "train.jsonl", ROWS[:4])
    write_jsonl(tmp_path / "test.jsonl", ROWS[4:])
    data = load_examples(config(path=str(tmp_path), eval_split="test", prompts=3, eval_prompts=1))
    assert [e.answer for e in data.train] == ["14", "1600", "18"]
    assert [e.answer for e in data.eval] == ["10"]
    none = load_examples(config(path=str(tmp_path), eval_prompts=0))
    assert (len(none.train), none.eval) == (4, [])


def test_messages_instruction_and_nested_fields(tmp_path):
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "7 + 7"}]
    row = {"prompt": messages, "reward_model": {"ground_truth": 14}}
    settings = {
        "path": write_jsonl(tmp_path / "a.jsonl", [row]),
        "prompt_field": "prompt",
        "answer_field": "reward_model.ground_truth",
        "answer_pattern": "",
        "eval_prompts": 0,
    }
    (example,) = load_examples(config(**settings)).train
    assert (example.prompt, example.answer) == (tuple(messages), "14")
    (example,) = load_examples(config(**settings, instruction=" Answer only.")).train
    assert [m["content"] for m in example.prompt] == ["Be brief.", "7 + 7 Answer only."]
    blank = {"role": "assistant", "content": " \n"}
    write_jsonl(tmp_path / "a.jsonl", [row | {"prompt": [*messages, blank]}])
    data = load_examples(config(**settings))
    assert (data.train[0].prompt, data.empty) == (tuple(messages), 0)


def test_commas_leave_numbers_only(tmp_path):
    answers = ["#### 1,234,567.5", "#### 3, 4", "#### a,b", "#### 1 #### -2,000"]
    rows = [{"question": answer, "answer": answer} for answer in answers]
    path = write_jsonl(tmp_path / "a.jsonl", rows)
    data = load_examples(config(path=path, eval_prompts=0))
    assert [e.answer for e in data.train[:3]] == ["1234567.5", "3, 4", "a,b"]
    last = load_examples(config(path=path, eval_prompts=0, answer_pattern=r"#### (\S+)"))
    assert last.train[3].answer == "-2000"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"path": "/no/such"}, r"^data\.path must be an existing .* got '/no/such'$"),
        ({"path": ""}, r"^data\.path must be an existing .* got ''$"),
        ({"split": "dev"}, r"^data\.path .* must have dev\.jsonl, its files: train"),
        (
            {"prompt_field": "text"},
            r"^data\.prompt_field must be one of the columns question, answer, got",
        ),
        ({"eval_prompts": 6}, r"^data\.eval_prompts must be < the 6 rows .* got 6"),
        ({"render": "specrl_jax.data.prompts:nothing"}, r"^data\.render must be 'module:function'"),
        ({"source": "sort"}, r"^data\.prompts must be > 0 for sort, got 0"),
    ],
)
def test_errors_are_one_line(tmp_path, change, message):
    write_jsonl(tmp_path / "train.jsonl", ROWS)
    assert re.search(message, line_of(load_examples, config(**{"path": str(tmp_path), **change})))


# --- what may be in training and held-out data ----------------------------------------------------


def test_a_question_is_trained_on_or_held_out_whatever_its_answer(tmp_path):
    rows = [("1 of 2?", "1"), ("2 of 2?", "2"), ("1 of 2?", "1.0"), ("3 of 2?", "3")]
    rows = [{"question": question, "answer": answer} for question, answer in rows]
    path = write_jsonl(tmp_path / "a.jsonl", rows)
    data = load_examples(config(path=path, answer_pattern=""))
    assert [e.prompt for e in data.eval] == ["1 of 2?", "3 of 2?"]
    assert [e.prompt for e in data.train] == ["2 of 2?"]
    assert data.duplicates == 1


def test_a_question_is_the_same_however_it_is_written(tmp_path):
    """By another order of keys, with a key of null, as text: none of it may be trained on."""
    chat = {"role": "user", "content": "1 of 2?"}
    backwards = {"content": "1 of 2?", "role": "user"}
    spellings = [[backwards], [chat | {"name": None}], "1 of 2?", [chat | {"name": "Ann"}]]
    rows = [{"question": x, "answer": f"{i}"} for i, x in enumerate([*spellings, [chat]])]
    path = write_jsonl(tmp_path / "a.jsonl", rows)
    settings = config(path=path, answer_pattern="", eval_prompts=1)
    data = load_examples(settings)
    assert [e.answer for e in data.eval] == ["4"]
    assert [e.answer for e in data.train] == ["3"]
    assert data.duplicates == 3


def test_in_an_environment_the_answer_belongs_to_the_question():
    settings = preset("micro", "multiturn")
    data = load_examples(settings)
    asked = {(e.prompt, e.answer) for e in data.train}
    assert len(data.train) + len(data.eval) == 30  # pairs of 0 to 4, each with its secrets
    assert {e.prompt for e in data.eval} & {prompt for prompt, _ in asked}
    assert not {(e.prompt, e.answer) for e in data.eval} & asked


def test_rows_without_a_question_are_left_out_and_counted(tmp_path):
    blank = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "\n"}]
    rows = [{"question": question, "answer": "1"} for question in ("a", "", " \n\t", blank, "b")]
    path = write_jsonl(tmp_path / "a.jsonl", rows)
    settings = {"path": path, "answer_pattern": "", "instruction": " Answer.", "eval_prompts": 1}
    data = load_examples(config(**settings))
    assert [e.prompt for e in data.train + data.eval] == ["a Answer.", "b Answer."]
    assert (data.empty, data.duplicates) == (3, 0)


# --- numbers to sort ------------------------------------------------------------------------------


def sorted_by_hand(question: str) -> str:
    numbers = [int(number) for number in question[:-1].split(" ")]
    return " ".join(str(n) for n in sorted(numbers, key=lambda n: n if question[-1] == ">" else -n))


def test_numbers_to_sort():
    data = load_examples(sort(min_numbers=3, max_numbers=6, max_value=12))
    assert (len(data.train), len(data.eval), data.duplicates) == (40, 10, 0)
    for example in data.train + data.eval:
        assert re.fullmatch(r"(\d+ ){2,5}\d+[<>]", example.prompt)
        assert example.answer == sorted_by_hand(example.prompt)
    assert {e.prompt[-1] for e in data.train} == {"<", ">"}
    assert {len(e.answer.split(" ")) for e in data.train} == {3, 4, 5, 6}
    assert {n for e in data.train for n in e.answer.split(" ")} == {*map(str, range(13))}


def test_products_and_how_a_tool_is_asked_for_them():
    settings = {"name": "product", "answer_pattern": "", "prompts": 40, "eval_prompts": 10}
    data = load_examples(config("product", **settings, options={"max_value": 120}))
    assert len({e.prompt for e in data.train + data.eval}) == 50
    for example in data.train + data.eval:
        first, second = map(int, example.prompt.removesuffix("=").split("*"))
        assert example.answer == str(first * second)
        call = f"<tool_call>{first}*{second}</tool_call>"
        said, _, end = solution(example, "solution").removeprefix(call).partition("\n")
        assert said == end == example.answer
        assert play(PythonTool, [end], example.answer) == ("", 1.0, True)
        (code,) = read_calls(call, "python")
        assert code.arguments == {"code": f"{first}*{second}"}
    wrong = config("product", **settings, options={"min_value": 3, "max_value": 2})
    rule = "data.options must have 0 <= min_value <= max_value for product, got 3 and 2"
    assert line_of(load_examples, wrong) == rule


@pytest.mark.parametrize("source", ["sort", "product"])
def test_a_row_is_a_function_of_seed_and_index(source):
    def rows(start, stop, seed):
        settings = config(source, prompts=40, eval_prompts=10)
        return [str(row) for row in READERS[source].read(settings.data, start, stop, seed)]

    assert rows(20, 30, seed=5) == rows(0, 40, seed=5)[20:30]
    assert not {*rows(0, 30, seed=4), *rows(0, 30, seed=6)} & {*rows(0, 30, seed=5)}


def test_every_problem_comes_once():
    """There are 20 of one digit; demonstrations take those that are left, or else training's."""
    settings = sort(min_numbers=1, max_numbers=1)
    settings.data.prompts, settings.data.eval_prompts = 12, 6
    data = load_examples(settings)
    left = load_warmup_examples(settings, 9, data)
    assert [len(part) for part in (data.train, data.eval, left)] == [12, 6, 2]
    assert len({e.prompt for e in data.train + data.eval + left}) == 20
    settings.data.prompts = 14
    data = load_examples(settings)
    assert load_warmup_examples(settings, 9, data) == data.train[:9]
    settings.data.prompts = 15
    line = line_of(load_examples, settings)
    assert re.match(r"data\.prompts \+ data\.eval_prompts must be <= the 20 problems .* 21$", line)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_decimals": 0}, r"\.max_decimals must be one of min_numbers, max_numbers, min_value"),
        ({"min_numbers": "3"}, r"\.min_numbers must be an integer, got '3'$"),
        ({"max_value": 9.5}, r"\.max_value must be an integer, got 9\.5$"),
        ({"min_numbers": 13}, r" must have 1 <= min_numbers <= max_numbers <= 1000 and .*got .*13"),
        ({"max_numbers": 10**9}, r" must have 1 <= min_numbers <= max_numbers <= 1000 and .*got"),
        ({"min_value": 10}, r" must have .* and min_value <= max_value, got \{'min_value': 10\}"),
    ],
)
def test_numbers_that_cannot_be_sorted(options, message):
    assert re.match(rf"data\.options{message}", line_of(load_examples, sort(**options)))


def test_an_empty_answer_is_no_demonstration():
    examples = [make_example("1>", "", "task", {}), make_example("2>", "2", "task", {})]
    assert demonstrations(examples, 0.0, seed=0) == [("2>", "2")]


def test_demonstrations_are_wrong_at_the_rate():
    examples = [make_example(f"{i}>", "0123456789 01234", "t", {}) for i in range(400)]
    pairs = demonstrations(examples, 0.08, seed=1)
    assert [p for p, _ in pairs] == [e.prompt for e in examples]
    digits = [(a, b) for _, t in pairs for a, b in zip(t, "0123456789 01234") if b != " "]
    wrong = np.mean([a != b for a, b in digits])
    # 6,000 digits: four standard deviations are 0.014.
    assert abs(wrong - 0.08) < 0.014
    assert all(re.fullmatch(r"\d{10} \d{5}", text) for _, text in pairs)
    assert len({(int(a) - int(b)) % 10 for a, b in digits if a != b}) == 9
    assert demonstrations(examples[::-1], 0.08, seed=1) == pairs[::-1]
    assert demonstrations(examples, 0.08, seed=2) != pairs
    assert {text for _, text in demonstrations(examples, 0.0, 1)} == {"0123456789 01234"}


def test_solutions_by_prompt_id():
    rows = [
        {"work": "1 2", "deep": {"work": "7"}}, {"work": None}, {"work": float("nan")},
        {"work": " "}, {"work": "123456"}, {"work": "12345"},
    ]  # fmt: skip
    examples = [make_example(f"{i}>", f"{i}", "t", row) for i, row in enumerate(rows)]
    assert [solution(example, "work") for example in examples[:2]] == ["1 2", None]
    assert solution(examples[0], "deep.work") == "7"
    tokenizer = CharacterTokenizer("0123456789 <>")
    found = encode_solutions(examples, tokenizer, "work", 6)
    assert found.keys() == {examples[0].prompt_id, examples[5].prompt_id}
    np.testing.assert_array_equal(found[examples[0].prompt_id], [3, 12, 4, 1])
    np.testing.assert_array_equal(found[examples[5].prompt_id], [3, 4, 5, 6, 7, 1])
    answers = encode_solutions(examples, tokenizer, "", 2)
    assert [x.tolist() for x in answers.values()] == [[2 + i, 1] for i in range(6)]
    no_answer = make_example("1>", "", "t", {})  # as of a task with a scorer of its own
    assert encode_solutions([no_answer], tokenizer, "", 2) == {}
    line = line_of(solution, make_example("", "", "t", {"work": 3}), "work")
    assert line == "data.solution_field must be text, got '3'"


# --- encoding -------------------------------------------------------------------------------------


def test_encoding_pads_right_and_drops_overlong():
    texts = ["12>", "1 2 3>", "1>", "1 2 3 4>"]
    examples = [make_example(text, "", "t", {}) for text in texts]
    encoded = encode_prompts(examples, CharacterTokenizer("0123456789 <>"), 6)
    assert encoded.dropped == 1
    expected = [[3, 4, 14, 0, 0, 0], [3, 12, 4, 12, 5, 14], [3, 14, 0, 0, 0, 0]]
    np.testing.assert_array_equal(encoded.tokens, expected)
    np.testing.assert_array_equal(encoded.lens, [3, 6, 2])
    assert [e.prompt for e in encoded.examples] == texts[:3]
    words = [f"{high:08x}{low:08x}" for high, low in encoded.ids]
    assert words == [e.prompt_id for e in encoded.examples]
    assert (encoded.tokens.dtype, encoded.lens.dtype, encoded.ids.dtype) == ("i4", "i4", "u4")


def test_nothing_left_to_encode():
    with pytest.raises(ValueError, match=r"^data\.prompt_len must .* got 1 with 3 .* of 2 tokens$"):
        encoded_set(3, prompt_len=1)
    with pytest.raises(ValueError, match=r"^data must have at least one prompt"):
        encoded_set(0)


def test_batches_are_joined_and_picked_from():
    encoded = encoded_set(5)
    both = Prompts.concatenate(encoded.select([4, 1]), encoded.select([0]))
    assert prompts_of(both) == ["4>", "1>", "0>"]
    assert prompts_of(both.select([2, 0])) == ["0>", "4>"]
    for name in ("tokens", "lens", "ids"):
        picked = getattr(both.select([2, 0]), name)
        np.testing.assert_array_equal(picked, getattr(encoded, name)[[0, 4]])


@pytest.mark.parametrize(("total", "size"), [(7, 3), (6, 3), (2, 5)])
def test_eval_batches_are_full_and_hold_each_prompt_once(total, size):
    encoded = encoded_set(total)
    batches = eval_batches(encoded, size)
    assert {batch.tokens.shape for batch, _ in batches} == {(size, 6)}
    real = [e for batch, valid in batches for e in batch.examples[:valid]]
    assert real == list(encoded.examples)
    ids = np.concatenate([batch.ids for batch, _ in batches])
    assert len(np.unique(ids, axis=0)) == len(batches) * size
    last, valid = batches[-1]
    assert len(last.examples) == size
    assert (last.lens[valid:] == 1).all()

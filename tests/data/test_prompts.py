"""Data: ids are frozen, the stream resumes and covers, errors are one line."""

import json
import re

import numpy as np
import pytest
from ml_collections import ConfigDict
from small_runs import line_of, preset

from specrl_jax.data.prompts import (
    concatenate,
    demonstrations,
    encode_prompts,
    eval_batches,
    load_examples,
    load_warmup_examples,
    make_example,
    render_number_sorting,
    select,
)
from specrl_jax.data.tokenizer import CharacterTokenizer

ROWS = [
    {"question": f"How much is {i} and {i}?", "answer": f"Twice {i}.\n#### {2 * i:,}"}
    for i in (7, 800, 9, 1234, 5, 6)
]


def config(source="jsonl", seed=0, **changes):
    config = preset("tiny")
    values = {"name": "doubles", "options": {}, "render": "", "answer_pattern": r"####\s*(.+)"}
    values |= {"source": source, "prompts": 0, "eval_prompts": 2, "prompt_len": 64}
    config.seed, config.data = seed, ConfigDict(config.data.to_dict() | values | changes)
    return config


def gym(**changes):
    sorting = {"min_numbers": 3, "max_numbers": 6, "min_value": 0, "max_value": 9}
    settings = {
        "name": "number_sorting",
        "options": {**sorting, "max_decimals": 0},
        "render": "specrl_jax.data.prompts:render_number_sorting",
        "answer_pattern": "",
        "prompts": 40,
        "eval_prompts": 10,
    }
    return config("reasoning_gym", **{**settings, **changes})


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
    (example,) = load_examples(config(**settings, instruction="Q: {prompt}\nA:")).train
    assert example.prompt[1] == {"role": "user", "content": "Q: 7 + 7\nA:"}
    prefix = {"role": "assistant", "content": "It is"}
    write_jsonl(tmp_path / "a.jsonl", [row | {"prompt": [*messages, prefix]}])
    (example,) = load_examples(config(**settings, instruction=" Answer only.")).train
    assert [m["content"] for m in example.prompt] == ["Be brief.", "7 + 7 Answer only.", "It is"]


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
        ({"split": "dev"}, r"^data\.path .* must hold dev\.jsonl, its files: train"),
        (
            {"prompt_field": "text"},
            r"^data\.prompt_field must be one of the columns question, answer, got",
        ),
        ({"eval_prompts": 6}, r"^data\.eval_prompts must be < the 6 rows .* got 6"),
        ({"render": "specrl_jax.data.prompts:nothing"}, r"^data\.render must be 'module:function'"),
        ({"source": "reasoning_gym"}, r"^data\.prompts must be > 0 for reasoning_gym, got 0"),
    ],
)
def test_errors_are_one_line(tmp_path, change, message):
    write_jsonl(tmp_path / "train.jsonl", ROWS)
    assert re.search(message, line_of(load_examples, config(**{"path": str(tmp_path), **change})))


# --- reasoning_gym --------------------------------------------------------------------------------


def test_reasoning_gym_splits_by_index():
    reasoning_gym = pytest.importorskip("reasoning_gym")
    settings = gym(render="", seed=3)
    data = load_examples(settings)
    task = reasoning_gym.create_dataset("number_sorting", seed=3, size=50, **settings.data.options)
    questions = [task[i]["question"] for i in range(50)]
    assert [e.prompt for e in data.eval] == list(dict.fromkeys(questions[40:]))
    assert [e.prompt for e in data.train] == [
        q for q in dict.fromkeys(questions[:40]) if q not in questions[40:]
    ]
    assert data.duplicates == 50 - len(data.train) - len(data.eval)
    # metadata is the entry that the task's own scorer takes.
    example = data.train[0]
    assert task.score_answer(example.answer, json.loads(json.dumps(example.metadata))) == 1.0


def test_reasoning_gym_unknown_task_or_option():
    pytest.importorskip("reasoning_gym")
    with pytest.raises(ValueError, match=r"^data\.name 'nothing' with data\.options: .*registered"):
        load_examples(gym(name="nothing"))
    with pytest.raises(ValueError, match=r"with data\.options: .*unexpected keyword .*'digits'"):
        load_examples(gym(options={"digits": 3}))


def test_sorting_worked_row():
    task = {"direction": "ascending", "original_numbers": ["3.0", "8", "1", "12.0"]}
    task["sorted_numbers"] = ["1", "3.0", "8", "12.0"]
    assert render_number_sorting({"metadata": task}) == ("3 8 1 12>", "1 3 8 12")
    task |= {"direction": "descending", "sorted_numbers": ["12.0", "8", "3.0", "1"]}
    assert render_number_sorting({"metadata": task}) == ("3 8 1 12<", "12 8 3 1")
    for bad in ("-3.0", "2.5"):
        with pytest.raises(ValueError, match=rf"^data\.options must give whole.*got {bad}"):
            render_number_sorting({"metadata": {**task, "original_numbers": [bad]}})


def test_warmup_examples_are_new():
    pytest.importorskip("reasoning_gym")
    settings = gym()
    data = load_examples(settings)
    warmup = load_warmup_examples(settings, 200, data)
    assert 150 < len(warmup) <= 200
    assert not {e.prompt_id for e in warmup} & {e.prompt_id for e in data.eval}


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


# --- encoding -------------------------------------------------------------------------------------


def encoded_set(total, prompt_len=6):
    examples = [make_example(f"{i}>", str(i), "t", {}) for i in range(total)]
    return encode_prompts(examples, CharacterTokenizer("0123456789 <>"), prompt_len)


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
    with pytest.raises(ValueError, match=r"^data must hold at least one prompt"):
        encoded_set(0)


def prompts_of(batch):
    return [e.prompt for e in batch.examples]


def test_batches_are_joined_and_picked_from():
    encoded = encoded_set(5)
    both = concatenate(select(encoded, [4, 1]), select(encoded, [0]))
    assert prompts_of(both) == ["4>", "1>", "0>"]
    assert prompts_of(select(both, [2, 0])) == ["0>", "4>"]
    for name in ("tokens", "lens", "ids"):
        picked = getattr(select(both, [2, 0]), name)
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

"""Records of responses: which prompts, the content of a line, and what a resume leaves of them."""

import errno
import json
import math
import re
import types

import jax
import numpy as np
import pytest
from rollout_reference import with_tokens

from specrl_jax.data.prompts import make_example
from specrl_jax.telemetry import records
from specrl_jax.telemetry.records import (
    FIELDS,
    Recorded,
    RolloutRecords,
    read_rollouts,
    recorded_steps,
    rollouts_path,
    select_prompts,
)
from specrl_jax.types import Example, Prompts, Rollout, Tokens

# Token ids and their text; 0 pads, 1 and 2 end a response and leave no text.
TEXTS = {0: "", 1: "", 2: "", 3: " ", 4: "3", 5: "1", 6: "4", 7: ">"}


def decode(ids):
    assert all(type(i) is int for i in ids)
    return "".join(TEXTS[i] for i in ids)


def make_prompts(ids=("a1", "b1"), tokens=((4, 3, 5, 7), (6, 7, 0, 0)), lens=(4, 2), answer="1 3"):
    """Two prompts, "3 1>" and "4>"."""
    examples = tuple(Example(prompt_id, "unused", answer, "sort", {}) for prompt_id in ids)
    words = np.zeros((len(ids), 2), np.uint32)
    return Prompts(np.array(tokens, np.int32), np.array(lens, np.int32), words, examples)


def make_rollout():
    """Two responses to each of two prompts; what stands after a length must not be read."""
    tokens = [[5, 3, 4, 1, 0], [5, 3, 4, 4, 4], [6, 2, 7, 7, 7], [7] * 5]
    logprobs = [[-0.00001, -1.23456, -2.5, -0.25, 9.0], [-1.0] * 5, [-0.5, -7.0, 9.0, 9.0, 9.0]]
    logprobs += [[math.nan] * 5]
    sources = [[2, 2, 1, 0, 9], [0] * 5, [2, 2, 9, 9, 9], [9] * 5]
    steps = [[1, 3, 7, 7, 99], [7] * 5, [2, 2, 99, 99, 99], [99] * 5]
    columns = Tokens(
        ids=np.array(tokens, np.int32),
        policy_logprobs=np.array(logprobs, np.float32),
        origin_steps=np.array(steps, np.int32),
        sources=np.array(sources, np.int8),
    )
    lens, prefix_lens = np.array([[4, 5, 2, 0], [2, 0, 2, 0]], np.int32)
    return Rollout(columns, lens, prefix_lens)


REWARDS = np.array([1, 0.1, 0, 0], np.float32)
FAILED = np.array([False, False, False, True])
MATH = np.array([1, 0.2, 0, 0], np.float32)
ENDED = np.array([True, False, True, False])


def open_records(workdir, share=1.0, **overrides):
    return RolloutRecords(workdir, share, **{"decode": decode} | overrides)


def write(out, step=7, epoch=2, **changes):
    responses = {
        "rollout": make_rollout(),
        "rewards": REWARDS,
        "failed": FAILED,
        "by_function": {"math": MATH},
        "ended": ENDED,
    }
    prompts = changes.pop("prompts", make_prompts())
    kind = changes.pop("kind", "step")
    out.write(step, epoch, prompts, Recorded(**responses | changes), kind)


def one_response(**changes):
    """A batch of one prompt with one response, the first of `make_rollout`."""
    return {
        "prompts": make_prompts(("a1",), ((4, 7),), (2,)),
        "rollout": jax.tree.map(lambda x: x[:1], make_rollout()),
        "rewards": REWARDS[:1],
        "failed": FAILED[:1],
        "by_function": {},
        "ended": ENDED[:1],
    } | changes


# Which prompts ------------------------------------------------------------------------------


def position(prompt_id):
    """Place of the id among the numbers of its length, in [0, 1)."""
    return int(prompt_id, 16) / 16 ** len(prompt_id)


IDS = [make_example(str(i), "", "", {}).prompt_id for i in range(5_000)]


@pytest.mark.parametrize("share", [0.02, 0.3, 0.9, 1.0])
def test_the_share_of_the_prompts_is_select_prompts(share):
    chosen = select_prompts(IDS, share)
    assert sorted(chosen) == [i for i, name in enumerate(IDS) if position(name) < share]
    deviation = math.sqrt(len(IDS) * share * (1 - share))
    assert abs(len(chosen) - len(IDS) * share) <= 4 * deviation
    positions = [position(IDS[i]) for i in chosen]
    assert positions == sorted(positions)


def test_a_tiny_share_still_records_the_eight_smallest_ids():
    for start in range(0, 500, 50):
        batch = IDS[start : start + 50]
        chosen = [position(batch[q]) for q in select_prompts(batch, 1e-9)]
        assert chosen == sorted(map(position, batch))[:8]
    assert select_prompts(IDS, 0) == select_prompts([], 0.5) == []
    assert sorted(select_prompts(IDS[:3], 1e-9)) == [0, 1, 2]


def test_parts_of_a_prompt_are_recorded_together_and_count_once():
    batch = [name for name in IDS[:20] for _ in range(2)]
    chosen = [batch[q] for q in select_prompts(batch, 1e-9)]
    assert chosen == [name for name in sorted(IDS[:20])[:8] for _ in range(2)]


# A line -------------------------------------------------------------------------------------


def test_every_field_by_hand(tmp_path):
    write(open_records(tmp_path))
    names = ("text", "token_ids", "token_ends", "sources", "policy_logprobs", "origin_steps",
             "reward", "by_function", "failed", "prefix_len", "ended")  # fmt: skip
    rows = [
        ("1 3", [5, 3, 4, 1], [1, 2, 3, 3], "rrds", [0, -1.2346, -2.5, -0.25],
         [1, 3, 7, 7], 1.0, {"math": 1.0}, False, 2, True),
        ("1 333", [5, 3, 4, 4, 4], [1, 2, 3, 4, 5], "sssss", [-1.0] * 5,
         [7] * 5, 0.1, {"math": 0.2}, False, 0, False),
        ("4", [6, 2], [1, 1], "rr", [-0.5, -7.0], [2, 2], 0.0, {"math": 0.0}, False, 2, True),
        ("", [], [], "", [], [], 0.0, {"math": 0.0}, True, 0, False),
    ]  # fmt: skip
    groups = [{"prompt_id": "a1", "prompt": "3 1>"}, {"prompt_id": "b1", "prompt": "4>"}]
    expected = [
        {"step": 7, "epoch": 2, "answer": "1 3", **groups[i // 2], "sample": i % 2}
        | dict(zip(names, row, strict=True))
        | {"turns": []}
        for i, row in enumerate(rows)
    ]
    assert position("a1") < position("b1")
    assert read_rollouts(tmp_path, 7) == expected
    assert [path.name for path in (tmp_path / "rollouts").iterdir()] == ["step_7.jsonl"]
    text = (tmp_path / "rollouts" / "step_7.jsonl").read_text("ascii")
    assert [json.loads(line) for line in text.splitlines()] == expected
    assert text.count("-0.0,") == 0
    assert {tuple(json.loads(line)) for line in text.splitlines()} == {tuple(FIELDS)}


@pytest.mark.parametrize(
    ("words", "left_out", "ends"),
    [
        ([b"a", b"\xe2\x82", b"\xac", b"b"], 0, [1, 1, 2, 3]),  # a character of two tokens
        ([b"\xff", b"b", b"b"], 0, [1, 2, 3]),  # no text in UTF-8
        ([b" one", b" two", b"s"], 1, [3, 7, 8]),  # as Llama's tokenizer decodes: no first space
        ([], 0, []),
    ],
)
def test_where_tokens_end(tmp_path, words, left_out, ends):
    def decode_bytes(tokens):
        return b"".join(words[i] for i in tokens).decode(errors="replace")[left_out:]

    ids = list(range(len(words)))
    out = open_records(tmp_path, decode=decode_bytes)
    assert out.token_ends(ids, decode_bytes(ids)) == ends


def test_a_share_of_the_prompts_with_all_their_samples(tmp_path, monkeypatch):
    monkeypatch.setattr(records, "_FEWEST", 1)
    share = (position("a1") + position("b1")) / 2
    reversed_prompts = make_prompts(("b1", "a1"))
    write(open_records(tmp_path, share), prompts=reversed_prompts)
    lines = read_rollouts(tmp_path, 7)
    # The second prompt of this batch, so rows 2 and 3.
    assert [(r["prompt_id"], r["sample"]) for r in lines] == [("a1", 0), ("a1", 1)]
    assert [r["token_ids"] for r in lines] == [[6, 2], []]
    assert [r["failed"] for r in lines] == [False, True]


def test_an_episodes_turns(tmp_path):
    """ "1 " of the policy, "3" of a tool, and the end."""
    row = one_response()
    sources = np.array([[0, 0, 3, 0, 0]], np.int8)
    row["rollout"] = with_tokens(row["rollout"], sources=sources)
    rewards, ends = np.array([[0.1, 0.9, 0]], np.float32), np.array([[2, 4, 0]], np.int32)
    row["turns"] = (rewards, ends, np.array([["tool", "", ""]]))
    write(open_records(tmp_path), **row)
    (record,) = read_rollouts(tmp_path, 7)
    assert record["sources"] == "sses"
    assert record["turns"] == [
        {"end": 2, "reward": 0.1, "role": "tool"},
        {"end": 4, "reward": 0.9, "role": ""},
    ]


def test_what_is_not_finite_is_null(tmp_path):
    row = one_response(rewards=np.array([math.nan], np.float32))
    logprobs = np.array([[-math.inf, math.nan, math.inf, -1e30, 0]], np.float32)
    row["rollout"] = with_tokens(row["rollout"], policy_logprobs=logprobs)
    write(open_records(tmp_path), **row)
    text = rollouts_path(tmp_path, 7).read_text()
    record = json.loads(text, parse_constant=pytest.fail)
    assert record["policy_logprobs"] == [None, None, None, float(np.float32(-1e30))]
    assert record["reward"] is None


def test_unusual_text_comes_back(tmp_path):
    """Line ends of every kind, half characters, a lone surrogate, quotes."""
    text = 'a\n\r\n\t\x00 👩\u200d👧 \ufffd \u2028 \u2029 \x85 \x0b \x0c \x1e \ud83d " \\ </script>'
    prompts = make_prompts(("a1",), ((4, 7),), (2,), answer=text)
    write(open_records(tmp_path, decode=lambda ids: text), **one_response(prompts=prompts))
    (record,) = read_rollouts(tmp_path, 7)
    assert record["text"] == record["prompt"] == record["answer"] == text
    content = rollouts_path(tmp_path, 7).read_bytes()
    assert len(content.decode("ascii").splitlines()) == 1
    assert content.endswith(b"}\n")


# Resume -------------------------------------------------------------------------------------


def test_a_new_run_without_records_has_no_folder(tmp_path):
    out = open_records(tmp_path, share=0)
    assert not out.active
    out.restore(-1)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("share", [1.0, 0])
@pytest.mark.parametrize(
    ("step", "kept"), [(11, [1, 2, 9, 10, 11]), (9, [1, 2, 9]), (0, []), (-1, [])]
)
def test_restore_removes_the_steps_after_the_checkpoint(tmp_path, share, step, kept):
    """Also where recording is off by now."""
    out = open_records(tmp_path)
    for number in (11, 9, 1, 10, 2):
        write(out, step=number)
    write(out, step=10, kind="eval")
    assert recorded_steps(tmp_path) == [1, 2, 9, 10, 11]
    open_records(tmp_path, share).restore(step)
    assert recorded_steps(tmp_path) == kept
    assert recorded_steps(tmp_path, "eval") == [10] * (step >= 10)


def test_restore_removes_unfinished_files_and_leaves_what_is_not_its_own(tmp_path):
    write(open_records(tmp_path), step=5)
    folder = tmp_path / "rollouts"
    others = ["step_6.jsonl.bak", "step_07.jsonl", "step_x.jsonl", "notes.txt", "my_step_9.jsonl"]
    for name in [*others, "step_6.jsonl.tmp"]:
        (folder / name).write_text("mine")
    assert recorded_steps(tmp_path) == [5]
    assert read_rollouts(tmp_path, 6) == []
    open_records(tmp_path).restore(0)
    assert sorted(path.name for path in folder.iterdir()) == sorted(others)
    assert recorded_steps(tmp_path) == []


def test_a_step_taken_again_replaces_its_file(tmp_path):
    out = open_records(tmp_path)
    write(out, epoch=2)
    write(out, epoch=3, **one_response())
    assert [(r["epoch"], r["prompt_id"]) for r in read_rollouts(tmp_path, 7)] == [(3, "a1")]


# Damage -------------------------------------------------------------------------------------


def test_a_full_disk_is_one_line_and_leaves_the_file_that_was_there(tmp_path, monkeypatch):
    out = open_records(tmp_path)
    write(out)
    before = rollouts_path(tmp_path, 7).read_bytes()

    def full(_):
        raise OSError(errno.ENOSPC, "No space left on device")

    # Only this module's `os`: the file has been written by then, but has not reached the disk.
    fake = types.SimpleNamespace(fsync=full, PathLike=records.os.PathLike)
    monkeypatch.setattr(records, "os", fake)
    with pytest.raises(OSError, match=r"step_7.jsonl: No space left on device; free space"):
        write(out, epoch=9)
    assert [path.name for path in (tmp_path / "rollouts").iterdir()] == ["step_7.jsonl"]
    assert rollouts_path(tmp_path, 7).read_bytes() == before


@pytest.mark.parametrize(
    ("line", "pattern", "written", "message"),
    [
        (1, rb"^(.{40}).*", rb"\1", "line 2 .* must be JSON: "),
        (3, rb".{9}$", b"", "line 4 .* must be JSON: "),
        (2, rb"^", b"\n", "line 3 .* must be JSON: "),
        (3, rb"$", b"\n[1, 2]", "line 5 .* must be a JSON object"),
        (0, rb"^.*", b"\xff\xfe\x00", "line 1 .* must be JSON: "),
        (0, rb'"sources"', b'"source"', "line 1 .* must have the field 'sources'"),
        (0, rb'(?<="reward":)[^,]*', b'"high"', "1 .* a number or null as 'reward', got 'high'"),
        (1, rb'(?<="token_ids":\[)', b"null,", "2 .* a list of whole numbers as 'token_ids', got"),
        (
            1,
            rb'(?<="turns":\[)',
            b'{"end":1}',
            "2 .* a list of turns, each with end, rew",
        ),
    ],
)
def test_damage_is_named_in_one_line(tmp_path, line, pattern, written, message):
    write(open_records(tmp_path))
    path = rollouts_path(tmp_path, 7)
    lines = path.read_bytes().splitlines()
    lines[line] = re.sub(pattern, written, lines[line], count=1)
    path.write_bytes(b"\n".join(lines))
    with pytest.raises(ValueError, match=message) as caught:
        read_rollouts(tmp_path, 7)
    assert str(caught.value).startswith(f"{path}: line ")
    assert "\n" not in str(caught.value)

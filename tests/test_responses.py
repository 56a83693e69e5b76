"""Parts of a response that rewards see, and errors of rewards in several processes."""

import json

import numpy as np
import pytest
from ml_collections import ConfigDict

from specrl_jax import hosts
from specrl_jax.responses import Responder
from specrl_jax.rewards.pool import RewardPool
from specrl_jax.rollout.stop_strings import make_stop_strings
from specrl_jax.text.tokenizer import HuggingFaceTokenizer


def test_rewards_see_special_tokens_where_they_are_kept(tmp_path):
    from tokenizers import AddedToken, Tokenizer, models

    backend = Tokenizer(models.WordLevel({"4": 0, "5": 1}, unk_token="4"))
    backend.add_special_tokens([AddedToken(x, special=True) for x in ("<think>", "</s>")])
    backend.save(str(tmp_path / "tokenizer.json"))
    tokenizer = HuggingFaceTokenizer(tmp_path / "tokenizer.json", chat=False)
    responses = [np.array(ids) for ids in ([2, 0, 2, 1, 3], [2, 0], [3], [])]
    seen = [
        [Responder(None, tokenizer, keep_special_tokens=keep).text(x) for x in responses]
        for keep in (False, True)
    ]
    assert seen == [["4 5", "4", "", ""], ["<think> 4 <think> 5", "<think> 4", "", ""]]


def test_what_a_reward_raises_in_one_process_is_raised_in_all(monkeypatch):
    class Broken:
        def score(self, *batch):
            raise ValueError("no server")

    parts = []

    def gather(own):
        parts.append(own)
        return parts

    monkeypatch.setattr(hosts, "gather", gather)
    with RewardPool("exact", timeout=1.0, memory_mib=64, workers=1) as pool:
        for one in (Broken(), pool):  # of two processes
            with pytest.raises(ValueError, match="no server"):
                Responder(one, None).rewards(["a"], [""], [""], [{}])
    assert len(parts) == 2


# Where a turn ends, and what rewards see of it ----------------------------------------------------

STOPS = ["</a>", "\n\n", "é", "中文", "🎉", "Answer: ", "<call>"]


def byte_level(folder):
    """A tokenizer of single bytes, and some merges within and across characters."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    split = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    ((wide, _),) = split.pre_tokenize_str("x中")
    merges = [(wide[0], wide[1]), ("<", "/"), ("a", ">")]
    vocab = {x: i for i, x in enumerate([*letters, *("".join(pair) for pair in merges)])}
    backend = Tokenizer(models.BPE(vocab, merges))
    backend.pre_tokenizer = split
    backend.decoder = decoders.ByteLevel()
    return saved(backend, folder, AddedToken)


def pieces(folder):
    """A tokenizer of pieces, whose other characters are bytes of their own."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    names = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *"▁<>/aAnswer:x", "中", "▁a"]
    vocab = {name: i for i, name in enumerate(dict.fromkeys(names))}
    backend = Tokenizer(models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(split=False)
    backend.decoder = decoders.Sequence([
        decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(),
        decoders.Strip(" ", 1, 0),
    ])  # fmt: skip
    return saved(backend, folder, AddedToken)


def saved(backend, folder, token):
    backend.add_special_tokens([token(x, special=True) for x in ("<call>", "</s>")])
    backend.save(str(folder / "tokenizer.json"))
    return HuggingFaceTokenizer(folder / "tokenizer.json", chat=False)


def stop_of(tokenizer, strings):
    return make_stop_strings(ConfigDict({"rollout": {"stop": json.dumps(strings)}}), tokenizer)


@pytest.mark.parametrize("make", [byte_level, pieces])
def test_a_turn_ends_where_its_text_has_the_string(make, tmp_path):
    """Token by token, whatever bytes of a character a token contains."""
    tokenizer = make(tmp_path)
    for string in STOPS[:-1]:
        stop = stop_of(tokenizer, [string])
        ids = tokenizer.encode(f"x {string[:-1]}x中 {string} x{string}")
        texts = [tokenizer.decode(ids[:n]) for n in range(len(ids) + 1)]
        count = next(n for n, text in enumerate(texts) if string in text)
        assert stop.count_to_end(ids) == count
        assert stop.cut(ids, tokenizer.decode, True) == texts[count]
        assert stop.cut(ids, tokenizer.decode, False) == texts[count].removesuffix(string)
        assert stop.count_to_end(ids[: count - 1]) == 0
        assert stop.cut(ids[: count - 1], tokenizer.decode, False) == texts[count - 1]


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("keep_stop", [False, True])
def test_special_tokens_count_as_they_are_written(tmp_path, keep, keep_stop):
    """For the row and for rewards, kept or not."""
    tokenizer = byte_level(tmp_path)
    (call,) = tokenizer._tokenizer.convert_tokens_to_ids(["<call>"])
    (end,) = tokenizer.eos_ids
    begin, rest = tokenizer.encode("</"), tokenizer.encode("a>")

    def read(ids, *strings):
        stop = stop_of(tokenizer, strings)
        responder = Responder(None, tokenizer, keep, stop=stop, keep_stop=keep_stop)
        return stop.count_to_end(ids), responder.text(np.array(ids))

    # Inside a string: the row goes on, and no text is cut there.
    ids = [*begin, call, *rest, *tokenizer.encode("x")]
    assert read(ids, "</a>") == (0, "</<call>a>x" if keep else "</a>x")
    assert read([*ids, *begin, *rest, end], "</a>")[1].startswith(
        "</<call>a>x" if keep else "</a>x"
    )
    # As a string, and as a part of one.
    ids = [*tokenizer.encode("xa"), call, *rest]
    kept = "xa<call>" if keep else "xa"
    assert read(ids, "<call>") == (3, kept if keep_stop else "xa")
    # An end that is a token leaves the text as it is.
    assert read([*begin, end], "</a>", "</s>")[1] == "</"


def test_one_line_where_a_string_cannot_be_written(tmp_path):
    from tokenizers import Tokenizer, models

    backend = Tokenizer(models.WordLevel({"4": 0, "5": 1, "</s>": 2}, unk_token="4"))
    backend.save(str(tmp_path / "tokenizer.json"))
    tokenizer = HuggingFaceTokenizer(tmp_path / "tokenizer.json", chat=False)
    assert stop_of(tokenizer, ["5 4"]).strings == ("5 4",)
    for string, rest in (("5é", "é"), ("4 6", " 6"), ("x", "x")):
        line = f"got {string!r}: no tokens produce {rest!r}; choose another text"
        with pytest.raises(ValueError, match=line):
            stop_of(tokenizer, [string])

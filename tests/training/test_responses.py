"""Parts of a response that rewards see, and errors of rewards in several processes."""

import numpy as np
import pytest

from specrl_jax import hosts
from specrl_jax.data.tokenizer import HuggingFaceTokenizer
from specrl_jax.rewards.workers import RewardPool
from specrl_jax.training.responses import Responder


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
                Responder(one, None).score(["a"], [""], [""], [{}])
    assert len(parts) == 2

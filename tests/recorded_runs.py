"""Work directories as runs leave them, written by hand."""

import json


def response(step, epoch, sample, token_texts, sources, **changes):
    """A line of a record; each token is a word."""
    ends, text = [], ""
    for token in token_texts:
        text += token
        ends.append(len(text))
    count = len(token_texts)
    line = {
        "step": step, "epoch": epoch, "prompt_id": "a1", "sample": sample, "prompt": "2 1>",
        "answer": "1 2", "text": text, "token_ids": [len(t) for t in token_texts],
        "token_ends": ends, "sources": sources, "policy_logprobs": [-0.5 * step] * count,
        "reward": float(sample), "by_function": {}, "failed": False, "origin_steps": [1] * count,
        "prefix_len": sources.count("r"), "ended": token_texts[-1] == "", "turns": [],
    }  # fmt: skip
    return line | changes


def write_files(folder, config, records, lines=()):
    """A work directory; the lines of responses by their step."""
    (folder / "rollouts").mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(x) + "\n" for x in records))
    for line in lines:
        with (folder / "rollouts" / f"step_{line['step']}.jsonl").open("a") as file:
            file.write(json.dumps(line, separators=(",", ":")) + "\n")
    return folder


def write_run(folder, seed=0, draft="previous", lines=(), reward=0.5):
    """Two epochs of three steps; rollouts of 4, 2, 2 and 1, 1, 9 seconds, of which steps 1 and 6
    compiled."""
    config = {"seed": seed, "rollout": {"draft": draft, "group_size": 2}}
    config["algorithm"] = {"advantage": "auto", "normalize_std": True}
    config["critic"] = {"kind": "none"}
    records = [{"step": 0, "epoch": 0, "reward/eval": 0.25}]
    for step, rollout in enumerate((4, 2, 2, 1, 1, 9), start=1):
        reused = 300 if step > 3 else 0
        records.append(
            {"step": step, "epoch": 1 + (step > 3), "reward/mean": reward, "time/rollout": rollout,
             "time/prefill": 0.5, "time/decode": 0.25, "time/update": 1.0, "time/step": rollout + 2,
             "time/compile": 3.0 if step in (1, 6) else 0.0, "rollout/tokens_reused": reused,
             "rollout/tokens_generated": 400 - reused, "rollout/row_steps": 10,
             "reward/no_signal": 0.5}
        )  # fmt: skip
    records[-1]["reward/eval"] = 0.75
    return write_files(folder, config, records, lines)


def two_epochs(first="1", **changes):
    return [
        response(2, 1, 0, [first, " ", "3", ""], "ssss", **changes),
        response(2, 1, 1, ["1", " ", "2", ""], "ssss", **changes),
        response(5, 2, 0, [first, " ", "2", ""], "rrds", **changes),
        response(5, 2, 1, ["1", " ", "2", ""], "rrrr", **changes),
    ]

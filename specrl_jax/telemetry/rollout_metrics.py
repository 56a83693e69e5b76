"""Scalars of a rollout and of its rewards, under the names of `metrics.METRICS`.

Takes NumPy arrays on the host. An undefined metric (no draft, no earlier response) is absent.
"""

from collections import Counter
from collections.abc import Sequence

import numpy as np


def rollout_metrics(
    tokens: np.ndarray,
    lens: np.ndarray,
    prefix_lens: np.ndarray,
    ended: np.ndarray,
    *,
    draft_lens: np.ndarray,
    previous: tuple[np.ndarray, np.ndarray],
    environment: np.ndarray,
    copied: np.ndarray,
    group_size: int,
) -> dict[str, float]:
    """Return the `rollout/*` metrics of the contents of B responses.

    tokens, lens, prefix_lens: as in `types.Rollout`.
    ended: bool [B], responses that finished; the others were cut off.
    draft_lens: int32 [B], lengths of the drafts (0: none).
    previous: tokens [B, R] and lens [B] (0: none) of the rows' last responses, for the overlap.
        They need not be the drafts.
    environment: int [B], environment tokens of the responses.
    copied: int [B], tokens of the responses that these forked from.
    group_size: G, responses per prompt, contiguous; divides B.
    """
    policy_lens = lens - environment - copied
    total = int(policy_lens.sum())
    reused = int(prefix_lens.sum())
    responses = [tuple(row[:n].tolist()) for row, n in zip(tokens, lens)]
    groups = [responses[i : i + group_size] for i in range(0, len(responses), group_size)]
    metrics = {
        "rollout/tokens_generated": total - reused,
        "rollout/tokens_reused": reused,
        "rollout/reuse_fraction": reused / max(total, 1),
        "rollout/prefix_len_mean": float(prefix_lens.mean()),
        "rollout/full_reuse_ratio": float(
            np.mean((prefix_lens > 0) & (prefix_lens == policy_lens))
        ),
        "rollout/response_len_mean": float(lens.mean()),
        "rollout/response_len_min": int(lens.min()),
        "rollout/response_len_max": int(lens.max()),
        "rollout/distinct": float(np.mean([len(set(group)) for group in groups])),
        "rollout/truncated_fraction": float(np.mean(~ended)),
    }
    if environment.any():
        metrics["rollout/tokens_environment"] = int(environment.sum())
    if copied.any():
        metrics["rollout/tokens_copied"] = int(copied.sum())
    if draft_lens.any():
        metrics["rollout/draft_accept_rate"] = reused / int(draft_lens.sum())
    if previous[1].any():
        overlap = [
            rouge1(now[:now_len].tolist(), before[:before_len].tolist()) if before_len else np.nan
            for now, now_len, before, before_len in zip(tokens, lens, *previous, strict=True)
        ]
        metrics["rollout/overlap_rouge1"] = float(np.nanmean(overlap))
        known = previous[1] > 0
        inside = np.arange(tokens.shape[1])[None, :] < lens[:, None]
        same_tokens = np.all((tokens == previous[0]) | ~inside, axis=1)
        unchanged = (lens == previous[1]) & same_tokens
        metrics["rollout/unchanged"] = float(np.mean(unchanged[known]))
    return metrics


def noise_metrics(kept: np.ndarray, rewards: np.ndarray) -> dict[str, float]:
    """Return the share of rows on reused noise, and the mean reward of the other rows.

    The policy has already trained on reused noise, so only rows on fresh noise are unbiased.

    kept: bool [B], rows whose noise an earlier rollout used.
    rewards: float32 [B].
    """
    metrics = {"rollout/reused_noise": float(np.mean(kept))}
    if not kept.all():
        metrics["reward/fresh_noise"] = float(np.mean(rewards[~kept], dtype=np.float64))
    return metrics


def turn_metrics(counts: np.ndarray, roles: np.ndarray) -> dict[str, float]:
    """Return metrics of B episodes.

    counts: int [B], turns of each episode.
    roles: str [B, K], the role of the reply to each turn; "" for none.
    """
    return {
        "rollout/turns_mean": float(np.mean(counts)),
        "rollout/tool_calls_mean": float(np.mean(np.sum(roles == "tool", axis=1))),
    }


# Names in `reward_metrics` that are shares of groups.
GROUP_REWARDS = ("reward/solved_all", "reward/solved_none", "reward/no_signal")


def reward_metrics(rewards: np.ndarray, failed: np.ndarray, group_size: int) -> dict[str, float]:
    """Return the `reward/*` metrics of B responses, with those of a prompt contiguous.

    rewards: float32 [B]. A response is right if its reward is at least 1.
    failed: bool [B], answers that hit a scoring limit or raised.
    group_size: G, responses per prompt; divides B.
    """
    solved = (rewards >= 1).reshape(-1, group_size)
    return {
        "reward/mean": float(np.mean(rewards, dtype=np.float64)),
        "reward/std": float(np.std(rewards, dtype=np.float64)),
        "reward/failed": int(np.sum(failed)),
        "reward/solved_all": float(np.mean(solved.all(axis=1))),
        "reward/solved_none": float(np.mean(~solved.any(axis=1))),
        "reward/no_signal": float(np.mean(np.ptp(rewards.reshape(-1, group_size), axis=1) == 0)),
    }


def rouge1(response: Sequence[int], previous: Sequence[int]) -> float:
    """Return ROUGE-1 F1 of two responses' token ids, in [0, 1]; 0 if both are empty.

        F1 = 2·Σₓ min(countₐ(x), count_b(x)) / (lenₐ + len_b)

    For example, [5 5 7] and [5 7 7 9] share one 5 and one 7: 2·2 / (3 + 4) = 0.571.
    """
    shared = Counter(response) & Counter(previous)
    return 2 * shared.total() / max(len(response) + len(previous), 1)

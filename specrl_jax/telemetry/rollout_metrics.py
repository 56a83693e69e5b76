"""The scalars of a rollout and of its rewards, under the names of `metrics.METRICS`.

Takes NumPy arrays on the host. A metric without a value (no draft, no earlier response) is absent.
"""

import numpy as np


def rollout_metrics(
    tokens: np.ndarray,
    lens: np.ndarray,
    prefix_lens: np.ndarray,
    eos_ids: tuple[int, ...],
    *,
    draft_lens: np.ndarray | None = None,
    previous: tuple[np.ndarray, np.ndarray] | None = None,
    forced: np.ndarray | None = None,
) -> dict[str, float]:
    """The `rollout/*` metrics of the contents of B responses.

    tokens: int32 [B, R], as in `types.Rollout`.
    lens, prefix_lens: int32 [B], as in `types.Rollout`.
    eos_ids: The tokens that end a response.
    draft_lens: int32 [B], lengths of the drafts; None without drafts.
    previous: tokens [B, R] and lens [B] (0: none) of the rows' last responses, for the overlap.
        They need not be the drafts.
    forced: int [B], tokens of the responses that an environment gave; None: none.
    """
    policy_lens = lens if forced is None else lens - forced
    total, reused = int(policy_lens.sum()), int(prefix_lens.sum())
    num_forced = int(lens.sum()) - total
    last = np.take_along_axis(tokens, np.maximum(lens - 1, 0)[:, None], axis=1)[:, 0]
    ended = np.isin(last, eos_ids) & (lens > 0)
    values = {
        "rollout/tokens_generated": total - reused,
        "rollout/tokens_reused": reused,
        "rollout/reuse_fraction": reused / max(total, 1),
        "rollout/prefix_len_mean": float(prefix_lens.mean()),
        "rollout/full_reuse_ratio": float(
            np.mean((prefix_lens > 0) & (prefix_lens == policy_lens))
        ),
        "rollout/response_len_mean": float(lens.mean()),
        "rollout/truncated_fraction": float(np.mean(~ended)),
    }
    if num_forced:
        values["rollout/tokens_forced"] = num_forced
    if draft_lens is not None and draft_lens.any():
        values["rollout/draft_accept_rate"] = reused / int(draft_lens.sum())
    if previous is not None and previous[1].any():
        overlap = overlap_rouge1(tokens, lens, *previous)
        values["rollout/overlap_rouge1"] = float(np.nanmean(overlap))
    return values


# The names in `reward_metrics` that are shares of groups.
GROUP_REWARDS = ("reward/solved_all", "reward/solved_none", "reward/no_signal")


def reward_metrics(rewards: np.ndarray, failed: np.ndarray, group_size: int) -> dict[str, float]:
    """The `reward/*` metrics of B responses, the `group_size` responses of a prompt side by side.

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


def overlap_rouge1(
    tokens_a: np.ndarray, lens_a: np.ndarray, tokens_b: np.ndarray, lens_b: np.ndarray
) -> np.ndarray:
    """ROUGE-1 F1 of two responses' token ids, row by row: float64 [B] in [0, 1]; nan if b is empty.

        F1 = 2·Σₓ min(countₐ(x), count_b(x)) / (lenₐ + len_b)

    For example, [5 5 7] and [5 7 7 9] share one 5 and one 7: 2·2 / (3 + 4) = 0.571.

    tokens_a, tokens_b: int32 [B, R] (the two R may differ), ids >= 0.
    lens_a, lens_b: int32 [B], tokens.
    """
    from scipy.sparse import csr_array

    lens_a, lens_b = np.asarray(lens_a), np.asarray(lens_b)
    vocab = 1 + max(np.max(tokens_a, initial=0), np.max(tokens_b, initial=0))

    def counts(tokens: np.ndarray, lens: np.ndarray) -> csr_array:
        """How often a row has each token, [B, vocab]."""
        inside = np.arange(tokens.shape[1]) < lens[:, None]
        found = csr_array(
            (np.ones(lens.sum(), np.int32), tokens[inside], np.cumsum([0, *lens])),
            shape=(len(lens), vocab),
        )
        found.sum_duplicates()
        return found

    shared = counts(tokens_a, lens_a).minimum(counts(tokens_b, lens_b)).sum(axis=1)
    with np.errstate(invalid="ignore"):
        return np.where(lens_b > 0, 2 * shared / (lens_a + lens_b), np.nan)

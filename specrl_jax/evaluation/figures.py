"""Evaluation figures with intervals: avg@n and pass@k."""

import math

import numpy as np


def pass_at_k(right: np.ndarray, k: int) -> np.ndarray:
    """Return float64 [Q]: probability that one of k responses is right, for bool [Q, n], k <= n.

    The unbiased estimator of Chen et al. (arXiv 2107.03374): 1 - C(n - c, k) / C(n, k), where c of
    n responses are right.
    """
    samples = right.shape[1]
    wrong = samples - np.count_nonzero(right, axis=1)
    return np.array([1 - math.comb(w, k) / math.comb(samples, k) for w in wrong.tolist()])


def mean_and_interval(values: np.ndarray) -> tuple[float, float]:
    """Return the mean of a per-prompt figure [Q], and half its 95 % interval; nan for one prompt.

    Normal, with the standard error over prompts: responses to one prompt are not independent
    (arXiv 2411.00640).
    """
    if len(values) < 2:
        return float(np.mean(values)), math.nan
    error = np.std(values, ddof=1) / math.sqrt(len(values))
    return float(np.mean(values)), float(1.96 * error)


def figures(rewards: np.ndarray) -> dict[str, tuple[float, float]]:
    """Return means and half intervals of rewards [Q, n]: avg@n, pass@k for k = 1, 2, 4 ... n.

    A response counts as right from reward 1 on.
    """
    samples = rewards.shape[1]
    ks = sorted({2**i for i in range(samples.bit_length())} | {samples})
    by_name = {f"avg@{samples}": np.mean(rewards, axis=1)}
    by_name |= {f"pass@{k}": pass_at_k(rewards >= 1, k) for k in ks if k <= samples}
    return {name: mean_and_interval(values) for name, values in by_name.items()}

"""Settings and evidence of advantages, for their tests."""

import numpy as np
from rollout_reference import put_rows

from specrl_jax.algorithms.advantages import ADVANTAGES
from specrl_jax.algorithms.evidence import AdvantageConfig, Evidence
from specrl_jax.types import Batch


def config(
    group_size=1, normalize_std=False, leave_one_out=False, gamma=1.0, gae_lambda=1.0,
    kind=AdvantageConfig, **own,
):  # fmt: skip
    """kind: class of the settings, which has the fields `own`."""
    return kind(group_size, normalize_std, leave_one_out, gamma, gae_lambda, **own)


def estimate(name, rewards, values, mask, settings, tokens=None, lens=None, **evidence):
    """Rows of `tokens` [B, R], or of zeros, after a prompt of one token."""
    mask = np.asarray(mask, bool)
    slots = mask.shape[1]
    tokens = np.zeros(mask.shape) if tokens is None else tokens
    batch = Batch(
        tokens=np.pad(tokens, ((0, 0), (1, 0))).astype(np.int32),
        prompt_lens=np.ones(len(mask), np.int32),
        response_lens=np.full(len(mask), slots, np.int32) if lens is None else np.int32(lens),
        old_logprobs=np.zeros(mask.shape, np.float32),
        advantages=np.zeros(mask.shape, np.float32),
        values=None if values is None else np.float32(values),
        from_environment=~mask,
    )
    rewards, batch = put_rows((np.float32(rewards), batch))
    return ADVANTAGES[name].estimate(Evidence(rewards, batch, **evidence), settings)

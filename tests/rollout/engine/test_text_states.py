"""Texts that are computed in windows: the same rollouts, and what is not computed."""

import dataclasses

import jax
import numpy as np
import pytest
import rollout_reference as ref
from scheduler_cases import PROMPTS, B, make_spec, run_rollout

from specrl_jax.rollout.engine import buckets as bucket_sizes
from specrl_jax.rollout.engine.prefill import prefill
from specrl_jax.rollout.engine.text_states import blank_states


@pytest.fixture
def in_windows(monkeypatch):
    """run(function) → its result where chunks are computed in windows of 8 slots."""

    def call(function):
        monkeypatch.setattr(bucket_sizes, "WINDOW_PARAMS", 0)
        monkeypatch.setitem(bucket_sizes.WINDOW_SLOTS, "cpu", 8)
        monkeypatch.setattr(bucket_sizes, "WINDOW_VERIFY_WIDTH", 2)
        clear()
        return function()

    def clear():
        prefill.clear_cache()
        blank_states.clear_cache()

    yield call
    clear()


@pytest.mark.parametrize("pieces", [1, 2])
def test_a_prompt_is_computed_once_for_its_group(make_mesh, in_windows, pieces):
    """Also if the group starts in parts. No token changes."""
    with jax.set_mesh(make_mesh(pieces, pieces, pieces)):
        spec = make_spec(max_rows=B // 2, **ref.ONE_BUCKET)
        tokens = PROMPTS.tokens.copy()
        tokens[:, 0] = np.arange(len(tokens))  # no two prompts start alike
        prompts = dataclasses.replace(PROMPTS, tokens=tokens)
        plain, stats = run_rollout(spec, prompts=prompts)
        rollout, fewer = in_windows(lambda: run_rollout(spec, prompts=prompts))
        ref.check_equal(ref.host(rollout), ref.host(plain))
    assert stats.repeated_tokens > 0 == fewer.repeated_tokens
    assert fewer.read_tokens == fewer.filled_tokens
    assert fewer.read_tokens + stats.repeated_tokens == stats.read_tokens


def test_nothing_is_computed_far_behind_a_rejection(make_mesh, in_windows, rollouts):
    """Fewer slots for the same tokens, and the same drafts kept."""
    with jax.set_mesh(make_mesh(1, 1, 1)):
        spec = make_spec(**ref.ONE_BUCKET)
        drafts = ref.as_drafts(rollouts.old)
        plain, stats = run_rollout(spec, drafts=drafts)
        rollout, fewer = in_windows(lambda: run_rollout(spec, drafts=drafts))
        ref.check_equal(ref.host(rollout), ref.host(plain))
    assert np.array_equal(rollout.prefix_lens, plain.prefix_lens)
    assert fewer.verified_tokens == stats.verified_tokens > fewer.accepted_tokens > 0
    assert fewer.filled_tokens < stats.filled_tokens
    assert fewer.read_tokens <= stats.read_tokens

"""Tokens with some of their columns."""

import jax
import numpy as np

from specrl_jax.types import Tokens

TOKENS = Tokens(
    ids=np.array([[4, 5]]),
    sampling_logprobs=np.array([[-1.0, -2.0]]),
    origin_steps=np.array([[7, 8]]),
)


def test_only_the_columns_of_some_names():
    assert jax.tree.leaves(TOKENS.only()) == [TOKENS.ids]
    some = TOKENS.only("origin_steps", "sources")
    assert some.ids is TOKENS.ids
    assert some.origin_steps is TOKENS.origin_steps
    assert some.sampling_logprobs is some.sources is None


def test_the_columns_that_others_keep():
    """A column that these do not keep stays out."""
    others = Tokens(ids=np.zeros((1, 3)), origin_steps=np.ones((1, 3)), sources=np.ones((1, 3)))
    some = TOKENS.like(others)
    assert some.ids is TOKENS.ids
    assert some.origin_steps is TOKENS.origin_steps
    assert some.sampling_logprobs is some.sources is None
    assert jax.tree.structure(TOKENS.like(TOKENS)) == jax.tree.structure(TOKENS)

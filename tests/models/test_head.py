"""Rows of a folded vocabulary."""

import pytest

from specrl_jax.models import head


@pytest.mark.parametrize(
    ("vocab_size", "rows"),
    [(16, 16), (1_023, 1_023), (1_025, 1), (49_152, 384), (151_936, 128), (262_144, 128)],
)
def test_rows_of_a_folded_vocabulary(vocab_size, rows):
    assert head.folded_rows(vocab_size) == rows

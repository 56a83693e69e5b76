"""How often a step calls its programs."""

import jax
import pytest
import small_runs

from specrl_jax.accelerators.abstract_run import abstract_run
from specrl_jax.accelerators.roofline import step_uses

# A mini-batch is 8 groups of 4 rows, a micro-batch 8 rows of 16 + 48 slots: 512 slots.
FIELDS = {
    "data.prompt_len": 16, "rollout.response_len": 48,
    "rollout.group_size": 4, "rollout.prompts_per_step": 16,
    "updates.mini_batch_size": 32, "updates.micro_batch_size": 8,
}  # fmt: skip


@pytest.mark.parametrize(
    ("packing", "tokens", "micro_batches"),
    [
        ("trie", 12, 1),  # 8 x 16 + 32 x 12 = 512 slots
        ("trie", 13, 2),  # 544 slots
        ("sequences", 12, 2),  # 32 x 28 = 896 slots
        ("rows", 12, 4),  # 32 rows, 8 at a time
    ],
)
def test_an_update_computes_what_rows_fill(packing, tokens, micro_batches, make_mesh):
    config = small_runs.small_config(FIELDS | {"updates.packing": packing})
    with jax.set_mesh(make_mesh(1, 2, 1)):
        calls, passes = step_uses(abstract_run(config), tokens, reuse=0.0)["update"]
    assert (calls, passes) == (2, 2 * micro_batches)

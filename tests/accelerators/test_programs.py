"""The programs that are compiled ahead are those that a run compiles."""

import jax
import pytest
import small_runs
from jax.experimental.compilation_cache import compilation_cache

from specrl_jax import runtime, train
from specrl_jax.accelerators.abstract_run import abstract_run, device_bytes
from specrl_jax.accelerators.chips import CHIPS
from specrl_jax.accelerators.compiled import Module
from specrl_jax.accelerators.plan import memory_plan
from specrl_jax.accelerators.programs import programs
from specrl_jax.models.kv_cache import init_cache

# A run that meets every bucket: rows wait and are inserted, caches are short and long. Its drafts
# share so little that they are verified over the rows.
FIELDS = {
    "rollout.group_size": 4, "rollout.prompts_per_step": 8, "rollout.max_rows": 16,
    "rollout.cache_lengths": 2, "rollout.adaptive": False, "rollout.max_width": 2,
    "algorithm.kl_coef": 0.01, "updates.micro_batch_size": 8, "rollout.temperature": 4.0,
}  # fmt: skip


@pytest.fixture
def empty_cache(tmp_path):
    """A compilation cache of the test's own: no other test has compiled anything for it."""
    before = jax.config.jax_compilation_cache_dir
    for folder in (str(tmp_path / "cache"), before):
        jax.clear_caches()
        compilation_cache.reset_cache()
        jax.config.update("jax_compilation_cache_dir", folder)
        if folder != before:
            yield


@pytest.mark.parametrize(
    ("draft", "other"),
    [
        # How drafts are packed depends on them.
        ("previous", {"verify_tries"}),
        # Without choices every step is as wide as it can be.
        pytest.param("previous+tree", {"verify_tries", "decode"}, marks=pytest.mark.slow),
    ],
)
def test_a_run_compiles_the_same_programs(make_mesh, tmp_path, empty_cache, draft, other):
    """After a run, all programs of its config come from the compilation cache."""
    config = small_runs.small_config(FIELDS | {"rollout.draft": draft})
    with jax.set_mesh(make_mesh(1, 2, 1)):
        train.train(config, tmp_path)
        every, missing = programs(abstract_run(config)), []
        jax.clear_caches()
        for name, program in every.items():
            runtime.compile_metrics()
            program.trace().lower().compile()
            missing += [name] * int(runtime.compile_metrics()["compile/built"])
    assert set(missing) <= other
    assert len(every) > 10


# They take drafts to the shards of their groups, and back, once a step.
EXCHANGES = {"pick_drafts", "store_drafts"}
OF_WEIGHTS = {"policy_copy", "logprobs", "update"}
MOVES = {"broadcast_prefill", "fewer_rows", "longer_cache", "insert", "write_back"}


def test_rows_stay_on_their_shard(make_mesh):
    """A change of the bucket needs no communication; the policy sends a few counts of rows."""
    config = small_runs.small_config(FIELDS | {"rollout.prompts_per_step": 16})
    config.rollout.max_rows = 32
    mesh = make_mesh(4, 2, 1)
    with jax.set_mesh(mesh):
        every = programs(abstract_run(config))
        for name in every.keys() - EXCHANGES - OF_WEIGHTS:
            text = every[name].trace().lower().compile().as_text()
            cost = Module(text, dict(mesh.shape)).cost()
            parts = [cost.collectives, cost.each.collectives if cost.each else {}]
            sent = sum(size for part in parts for _, size in part.values())
            assert sent <= (0 if name in MOVES else 1_000), name
    assert every.keys() > MOVES


def test_the_plan_by_hand(make_mesh):
    """Bytes of a device of two, from the sizes in the config."""
    changes = {"rollout.draft_age": 1, "algorithm.kl_coef": 0.01, "updates.micro_batch_size": 0}
    config = small_runs.small_config(changes)
    with jax.set_mesh(make_mesh(1, 2, 1)):
        run = abstract_run(config)
        every = programs(run)
        plan = memory_plan(run, every, CHIPS["v5e"])
        cache = init_cache(run.model, run.running, run.slots)
    vocab, embed, mlp, heads, kv_heads, size = 16, 16, 32, 4, 2, 4
    split = vocab * embed + embed * (heads + 2 * kv_heads + heads) * size + 3 * embed * mlp
    whole = 3 * embed + 2 * size  # norms are on every device
    weights = 4 * (split // 2 + whole)
    held = plan.held
    assert held["weights, float32"] == held["reference"] == weights
    assert held["optimizer"] == 2 * weights + 2 * 4  # two moments, two counters
    assert held["rollout's weights, float32"] == 4 * (split + whole)
    rows, slots = 32, 3 + 6
    assert (run.running, run.slots) == (rows, slots)
    kv = [x for name, x in held.items() if name.startswith("KV cache")]
    assert kv == [rows // 2 * slots * kv_heads * size * 2 * 4]
    assert kv == [sum(x.nbytes for x in jax.tree.leaves(cache)) // 2]
    # 64 prompts (12 rounded up) x 8 samples: tokens, two log-probs and their steps; lengths, steps.
    drafts = [x for name, x in held.items() if name.startswith("drafts")]
    assert drafts == [64 // 2 * 8 * (6 * 4 * 4 + 2 * 4)]
    assert plan.rows_that_fit == run.rows
    assert plan.programs.keys() == every.keys()
    assert device_bytes(run.state.params) == weights

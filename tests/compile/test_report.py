"""The figures and the table of a run's programs, and what they send on a simulated mesh."""

import re
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest
import small_runs
from hlo import Module
from jax.sharding import NamedSharding

from specrl_jax.abstract import device_bytes
from specrl_jax.compile.from_config import abstract_run
from specrl_jax.compile.programs import Program, compile_all, rollout_programs
from specrl_jax.compile.report import compile_program, count_flops, to_text

FIELDS = {
    "rollout.prompts_per_step": 16, "rollout.max_rows": 32, "rollout.draft": "previous+tree",
    "rollout.max_width": 2, "algorithm.kl_coef": 0.01,
}  # fmt: skip


def test_rows_stay_on_their_shard(make_mesh):
    """Rows move without communication; those that run send a few counts of rows, and those that
    start gather the layers' weights."""
    mesh = make_mesh(4, 2, 1)
    moves = re.compile("compact|write back")
    sent = {}
    with jax.set_mesh(mesh):
        run = abstract_run(small_runs.small_config(FIELDS))
        for program in rollout_programs(run.training):
            compiled = compile_all([program])[program.name]
            collectives = Module(compiled.as_text(), dict(mesh.shape)).collectives()
            weights = ("all-gather", "fsdp") if program.name == "prefill" else ()
            others = [size for key, (_, size) in collectives.items() if key[:2] != weights]
            sent[program.name] = sum(others)
    assert {name for name in sent if moves.match(name)} == {
        "compact to 16", "compact a layer to 16", "write back 32", "write back 16"
    }  # fmt: skip
    assert not any(size for name, size in sent.items() if moves.match(name))
    assert all(size <= 1_000 for size in sent.values()), sent


def test_what_a_run_keeps_by_hand(make_mesh):
    """Bytes of a device of two, from the sizes in the config."""
    changes = {"rollout.draft_age": 1, "algorithm.kl_coef": 0.01}
    with jax.set_mesh(make_mesh(1, 2, 1)):
        kept = device_bytes(abstract_run(small_runs.small_config(changes)).kept)
    vocab, embed, mlp, heads, kv_heads, size = 16, 16, 32, 4, 2, 4
    split = vocab * embed + embed * (heads + 2 * kv_heads + heads) * size + 3 * embed * mlp
    whole = 3 * embed + 2 * size  # norms are on every device
    weights = 4 * (split // 2 + whole)
    # The reference is a second copy. The optimizer has two moments and two counters.
    of_policy = 2 * weights + 2 * weights + 2 * 4
    # 64 prompts (8 rounded up) x 8 samples: tokens, two log-probs and their steps; lengths, steps.
    drafts = 64 // 2 * 8 * (6 * 4 * 4 + 2 * 4)
    assert kept == of_policy + drafts


def test_flops_by_hand(make_mesh):
    """Three layers scanned, a product in an open loop, and one on each device of two."""

    def program(x, layers, last, steps):
        x, _ = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, layers)
        x = jax.shard_map(lambda x, w: x @ w, out_specs=jax.P("data", None))(x, last)
        return jax.lax.fori_loop(0, steps, lambda _, x: x @ last, x)

    mesh = make_mesh(2, 1, 1)
    with jax.set_mesh(mesh):

        def placed(shape, *axes):
            layout = NamedSharding(mesh, jax.P(*axes))
            return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=layout)

        shapes = (
            placed((8, 16), "data", None), placed((3, 16, 16), None, None, None),
            placed((16, 16), None, None), jax.ShapeDtypeStruct((), jnp.int32),
        )  # fmt: skip
        traced = jax.jit(program).trace(*shapes)
    assert count_flops(traced.jaxpr) == (3 + 1 + 1) * 2 * 8 * 16 * 16


@pytest.mark.parametrize(
    ("says", "cell"),
    [
        ("Ran out of memory in hbm. Used 30.5G of 15.75G hbm.", "does not fit: 32.7 GB"),
        ("a product that cannot\nbe compiled", "RuntimeError: a product that cannot be compiled"),
    ],
)
def test_a_refusal_is_a_line_of_the_table(mesh, says, cell):
    def refuse():
        raise RuntimeError(says)

    half = 50_000  # of what the chip has
    whole = SimpleNamespace(memory=2 * half)
    x = jnp.ones((64, 64))
    fits = Program("update", lambda: jax.jit(lambda x: x @ x).trace(x), kept=half)
    table = [
        compile_program(program, whole, kept=half)
        for program in (Program("prefill", refuse), fits, fits._replace(name="decode", kept=0))
    ]
    assert table[1]["flops"] == 2 * 64**3
    headings, refused, update, decode = to_text(table).splitlines()
    assert headings.split()[:3] == ["program", "compile", "arguments"]
    assert refused.startswith("prefill")
    assert refused.endswith(cell)
    # The result of 16,384 bytes, beside an argument of as many; what a run keeps lies beside both,
    # but for the update, whose arguments are that.
    assert update.split()[-2:] == ["33%", "0.0"]
    assert decode.split()[-2:] == ["83%", "0.0"]

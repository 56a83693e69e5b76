"""What is read of a compiled program: a CPU's with known figures, and HLO written by hand."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding

from specrl_jax.accelerators.compiled import Module, groups_of, nbytes
from specrl_jax.accelerators.traced import count_flops, temporary_bytes
from specrl_jax.models import attention_tpu

MESH = {"data": 2, "fsdp": 2, "tensor": 1}


def _placed(mesh, shape, *axes):
    return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, jax.P(*axes)))


def test_collectives_and_loops_of_a_real_program(make_mesh):
    """A sum over fsdp in a loop of 5 passes, a gather over data once, and an open loop."""
    mesh = make_mesh(2, 2, 1)

    def program(x, steps):
        summed = jax.lax.fori_loop(
            0, 5, lambda _, x: jax.lax.psum(x, "fsdp") * 0.5, x, unroll=False
        )
        whole = jax.lax.all_gather(summed, "data")
        return jax.lax.fori_loop(0, steps, lambda _, x: jax.lax.pmax(x, ("data", "fsdp")), whole)

    sharded = jax.shard_map(
        program, mesh=mesh, in_specs=(jax.P("data"), jax.P()), out_specs=jax.P(), check_vma=False
    )
    with jax.set_mesh(mesh):
        steps = jax.ShapeDtypeStruct((), jnp.int32)
        compiled = jax.jit(sharded).lower(_placed(mesh, (8, 32), "data"), steps).compile()
    cost = Module(compiled.as_text(), MESH).cost()
    size = 4 * 32 * 4
    counted = {key: tuple(numbers) for key, numbers in cost.collectives.items()}
    assert counted == {("all-reduce", "fsdp"): (5, 5 * size), ("all-gather", "data"): (1, 2 * size)}
    each = {key: tuple(numbers) for key, numbers in cost.each.collectives.items()}
    assert each == {("all-reduce", "data x fsdp"): (1, 2 * size)}
    assert sorted(passes or 0 for _, passes in cost.loops) == [0, 5]


HLO = """
HloModule m

%half (p0: f32[10,100], p1: s32[]) -> f32[1,100] {
  %p0 = f32[10,100]{1,0} parameter(0)
  %p1 = s32[] parameter(1)
  ROOT %cut = f32[1,100]{1,0} dynamic-slice(%p0, %p1, %p1), dynamic_slice_sizes={1,100}
}

%body (state: (s32[], f32[10,100])) -> (s32[], f32[10,100]) {
  %state = (s32[], f32[10,100]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%state), index=0
  %x = f32[10,100]{1,0} get-tuple-element(%state), index=1
  %cut.1 = f32[1,100]{1,0} fusion(%x, %i), calls=%half, config={"estimated_cycles":"7"}
  %near = f32[1,100]{1,0:S(1)} negate(%cut.1)
  %new = f32[10,100]{1,0} dynamic-update-slice(%x, %near, %i, %i)
  %far = f32[10,100]{1,0} collective-permute(%new), source_target_pairs={{0,2},{2,0},{1,3},{3,1}}
  ROOT %next = (s32[], f32[10,100]{1,0}) tuple(%i, %far)
}

%condition (state: (s32[], f32[10,100])) -> pred[] {
  %state.1 = (s32[], f32[10,100]{1,0}) parameter(0)
  %i.1 = s32[] get-tuple-element(%state.1), index=0
  %bound = s32[] constant(3)
  ROOT %less = pred[] compare(%i.1, %bound), direction=LT
}

ENTRY %main (a: f32[10,100]) -> (s32[], f32[10,100]) {
  %a = f32[10,100]{1,0} parameter(0)
  %zero = s32[] constant(0)
  %b = f32[10,100]{1,0} all-reduce(%a), replica_groups=[2,2]<=[2,2]T(1,0), to_apply=%add
  %begin = (s32[], f32[10,100]{1,0}) tuple(%zero, %b)
  ROOT %end = (s32[], f32[10,100]{1,0}) while(%begin), body=%body, condition=%condition, op_name="f"
}
"""


def test_bytes_cycles_and_axes_of_hlo():
    cost = Module(HLO, MESH).cost()
    assert cost.each is None  # three passes: the counter is compared with 3
    # The sum reads and writes 4,000. A pass: a slice is read and written (800) at an index (4);
    # negate reads 400 and writes near the core, S(1); 400 are written from there; 8,000 permuted.
    assert cost.moved == 8_000 + 3 * (804 + 400 + 400 + 8_000)
    assert cost.cycles == 3 * 7
    counted = {key: tuple(numbers) for key, numbers in cost.collectives.items()}
    assert counted == {
        ("all-reduce", "data"): (1, 4_000),
        ("collective-permute", "data"): (3, 12_000),
    }
    assert {key: tuple(n) for key, n in cost.loops.items()} == {("f", 3): (1, 21)}


def test_bytes_of_a_type():
    text = "(bf16[2,3]{1,0:T(8,128)(2,1)}, s8[5]{0:T(128)S(1)}, pred[])"
    assert nbytes(text) == 12 + 1
    assert nbytes(text, anywhere=True) == 12 + 5 + 1


@pytest.mark.parametrize(
    ("text", "groups"),
    [
        ("replica_groups={{0,3},{1,2}}, x", [[0, 3], [1, 2]]),
        ("source_target_pairs={{0,1},{1,0}}", [[0, 1], [1, 0]]),
        ("replica_groups=[2,2]<=[2,2]T(1,0), x", [[0, 2], [1, 3]]),
        ("replica_groups=mesh['a'=2,'b'=2] {'b'}, x", [[0, 1], [2, 3]]),
        ("replica_groups=mesh['a'=4] {'a':(1)2}, x", [[0, 2], [1, 3]]),
        ("replica_groups={}, x", [[0, 1, 2, 3]]),
    ],
)
def test_groups_of_a_collective(text, groups):
    assert [group.tolist() for group in groups_of(text, 4)] == groups


def test_flops_and_memory_of_a_trace(make_mesh):
    """By hand: three layers scanned, then a product in an open loop."""

    def program(x, layers, last, steps):
        x, _ = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, layers)
        return jax.lax.fori_loop(0, steps, lambda _, x: x @ last, x)

    mesh = make_mesh(2, 1, 1)
    with jax.set_mesh(mesh):
        shapes = (
            _placed(mesh, (8, 16), "data", None), _placed(mesh, (3, 16, 16), None, None, None),
            _placed(mesh, (16, 16), None, None), jax.ShapeDtypeStruct((), jnp.int32),
        )  # fmt: skip
        traced = jax.jit(program).trace(*shapes)
    assert count_flops(traced.jaxpr) == (3 * 2 * 8 * 16 * 16, 2 * 8 * 16 * 16)
    # The scan's state, and a pass's product: each 4 of 8 rows on a device.
    assert temporary_bytes(traced.jaxpr) == pytest.approx(2 * 4 * 16 * 4, abs=64)


def test_memory_of_donated_and_fused_arrays(mesh):
    def program(x, y):
        z = jnp.tanh(x) @ y  # of an array that has to be there for the product
        return x + jnp.exp(z) * 2  # computed at once

    shapes = [_placed(jax.sharding.get_mesh(), (64, 64), None, None) for _ in range(2)]
    traced, size = jax.jit(program).trace(*shapes), 64 * 64 * 4
    assert temporary_bytes(traced.jaxpr) == 2 * size  # tanh and z, then z and the result
    assert temporary_bytes(traced.jaxpr, (shapes[0],)) == 2 * size


KERNEL_HLO = """
HloModule m

ENTRY %main (lens: s32[2], q: bf16[2,8,128], cache: bf16[16,128,8,128]) -> bf16[2,8,128] {
  %lens = s32[2]{0} parameter(0)
  %q = bf16[2,8,128]{2,1,0} parameter(1)
  %cache = bf16[16,128,8,128]{3,2,1,0} parameter(2)
  ROOT %out = bf16[2,8,128]{2,1,0} custom-call(%lens, %q, %cache), custom_call_target="tpu_custom_call", metadata={op_name="jit(step)/ragged_paged_attention_kernel"}
}
"""  # noqa: E501


def test_kernels_over_the_cache_read_its_live_part():
    cost = Module(KERNEL_HLO, MESH, live=0.25).cost()
    queries, cache = 2 * 8 * 128 * 2, 16 * 128 * 8 * 128 * 2
    assert cost.moved == cost.kernels == 8 + 2 * queries + cache / 4


def test_flops_of_attention_kernels(make_mesh):
    """Two rows of 256 slots, a quarter of them live; sequences of 256 tokens with gradients."""
    mesh = make_mesh(2, 1, 2)
    with jax.set_mesh(mesh):

        def array(*shape, dtype=jnp.float32):
            axes = ("data", None, "tensor", None)[: len(shape)]
            sharding = NamedSharding(mesh, jax.P(*axes))
            return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

        starts = array(2, dtype=jnp.int32)
        layer = (array(2, 256, 4, 128),)
        attend = jax.jit(attention_tpu.attend, static_argnums=3)
        decode = attend.trace(array(2, 1, 8, 128), layer, starts, 2)
        pairs = 2 * 8 * 256 * 128  # rows, heads, slots, head size
        assert count_flops(decode.jaxpr, 0.25).once == 2 * 2 * pairs / 4

        def loss(q, k, v, ends):
            return attention_tpu.attend_packed(q, k, v, ends).sum()

        keys, ends = array(2, 256, 4, 64), array(2, 256, dtype=jnp.int32)
        inputs = array(2, 256, 8, 64), keys, keys, ends
        update = jax.jit(jax.grad(loss, argnums=(0, 1, 2))).trace(*inputs)
        pairs = 2 * 8 * 256 * 256 * 64 / 2  # half of them causal
        # Forward, which jax 0.10 computes again; queries' gradients; those of keys and values.
        forward = 2 if jax.__version_info__ < (0, 11) else 1
        flops = count_flops(update.jaxpr, kernels_only=True).once
        assert flops == 2 * (2 * forward + 3 + 4) * pairs

"""Collectives of compiled programs: a CPU's with known figures, and HLO written by hand."""

import jax
import jax.numpy as jnp
import pytest
from hlo import Module, groups_of, nbytes
from jax.sharding import NamedSharding

MESH = {"data": 2, "fsdp": 2, "tensor": 1}


def _counted(text: str) -> dict:
    return {key: tuple(numbers) for key, numbers in Module(text, MESH).collectives().items()}


def test_collectives_of_a_real_program(make_mesh):
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
    layout = NamedSharding(mesh, jax.P("data"))
    with jax.set_mesh(mesh):
        x = jax.ShapeDtypeStruct((8, 32), jnp.float32, sharding=layout)
        steps = jax.ShapeDtypeStruct((), jnp.int32)
        text = jax.jit(sharded).lower(x, steps).compile().as_text()
    size = 4 * 32 * 4
    assert _counted(text) == {
        ("all-reduce", "fsdp", False): (5, 5 * size),
        ("all-gather", "data", False): (1, 2 * size),
        ("all-reduce", "data x fsdp", True): (1, 2 * size),
    }


HLO = """
HloModule m

%body (state: (s32[], f32[10,100])) -> (s32[], f32[10,100]) {
  %state = (s32[], f32[10,100]{1,0:T(8,128)}) parameter(0)
  %i = s32[] get-tuple-element(%state), index=0
  %x = f32[10,100]{1,0:T(8,128)} get-tuple-element(%state), index=1
  %far = f32[10,100]{1,0} collective-permute(%x), source_target_pairs={{0,2},{2,0},{1,3},{3,1}}
  ROOT %next = (s32[], f32[10,100]{1,0}) tuple(%i, %far)
}

%condition (state: (s32[], f32[10,100])) -> pred[] {
  %state.1 = (s32[], f32[10,100]{1,0}) parameter(0)
  %i.1 = s32[] get-tuple-element(%state.1), index=0
  %bound = s32[] constant(3)
  ROOT %less = pred[] compare(%i.1, %bound), direction=LT
}

%large (a.1: f32[10,100]) -> f32[10,100] {
  %a.1 = f32[10,100]{1,0} parameter(0)
  ROOT %sum = f32[10,100]{1,0} all-reduce(%a.1), replica_groups={{0,1},{2,3}}, to_apply=%add
}

%small (a.2: f32[10,100]) -> f32[10,100] {
  ROOT %a.2 = f32[10,100]{1,0} parameter(0)
}

ENTRY %main (a: f32[10,100], p: pred[]) -> (s32[], f32[10,100]) {
  %a = f32[10,100]{1,0} parameter(0)
  %p = pred[] parameter(1)
  %zero = s32[] constant(0)
  %b = f32[10,100]{1,0} all-reduce(%a), replica_groups=[2,2]<=[2,2]T(1,0), to_apply=%add
  %c = f32[10,100]{1,0} conditional(%p, %b, %b), branch_computations={%small, %large}
  %d = f32[20,100]{1,0} all-gather(%c), replica_groups={{0,1},{2,3}}
  %begin = (s32[], f32[10,100]{1,0}) tuple(%zero, %c)
  ROOT %end = (s32[], f32[10,100]{1,0}) while(%begin), condition=%condition, body=%body
}
"""


def test_collectives_of_hlo():
    """Three passes, as the counter is compared with 3, and the branch that sends."""
    assert _counted(HLO) == {
        ("all-reduce", "data", False): (1, 4_000),
        ("all-reduce", "fsdp", False): (1, 4_000),
        ("all-gather", "fsdp", False): (1, 8_000),
        ("collective-permute", "data", False): (3, 12_000),
    }
    unknown = HLO.replace("direction=LT", "direction=NE")
    assert _counted(unknown)["collective-permute", "data", True] == (1, 4_000)
    known = unknown.replace("body=%body", 'body=%body, config={"known_trip_count":{"n":"7"}}')
    assert _counted(known)["collective-permute", "data", False] == (7, 28_000)


def test_bytes_of_a_type():
    assert nbytes("(bf16[2,3]{1,0:T(8,128)(2,1)}, s8[5]{0:T(128)S(1)}, pred[])") == 12 + 5 + 1


@pytest.mark.parametrize(
    ("text", "groups"),
    [
        ("replica_groups={{0,3},{1,2}}, x", [[0, 3], [1, 2]]),
        ("source_target_pairs={{0,1},{1,0}}", [[0, 1], [1, 0]]),
        ("replica_groups=[2,2]<=[2,2]T(1,0), x", [[0, 2], [1, 3]]),
        ("replica_groups=mesh['a'=2,'b'=2] {'b'}, x", [[0, 1], [2, 3]]),
        ("replica_groups=mesh['a'=4] {'a':(1)2}, x", [[0, 2], [1, 3]]),
        (
            "replica_groups=mesh['a'=2,'b'=2], device_ids=([2,2]T(1,0)) {'a'}, x",
            [[0, 1], [2, 3]],
        ),
        ("replica_groups={}, x", [[0, 1, 2, 3]]),
    ],
)
def test_groups_of_a_collective(text, groups):
    assert [group.tolist() for group in groups_of(text, 4)] == groups

"""Collectives of compiled programs: a CPU's, with known figures."""

import functools

import jax
import jax.numpy as jnp
import pytest
from hlo import Module, groups_of, nbytes
from jax.sharding import NamedSharding


def test_collectives_of_a_real_program(make_mesh):
    """A sum over fsdp in a loop of 5 passes, a gather over data once, an open loop, and a branch
    that sends next to one that does not."""
    mesh = make_mesh(2, 2, 1)

    def program(x, steps):
        summed = jax.lax.fori_loop(
            0, 5, lambda _, x: jax.lax.psum(x, "fsdp") * 0.5, x, unroll=False
        )
        whole = jax.lax.all_gather(summed, "data")
        whole = jax.lax.fori_loop(0, steps, lambda _, x: jax.lax.pmax(x, ("data", "fsdp")), whole)
        swap = functools.partial(jax.lax.ppermute, axis_name="data", perm=[(0, 1), (1, 0)])
        return jax.lax.cond(steps > 2, swap, lambda x: x * 2, whole)

    sharded = jax.shard_map(
        program, mesh=mesh, in_specs=(jax.P("data"), jax.P()), out_specs=jax.P(), check_vma=False
    )
    layout = NamedSharding(mesh, jax.P("data"))
    with jax.set_mesh(mesh):
        x = jax.ShapeDtypeStruct((8, 32), jnp.float32, sharding=layout)
        steps = jax.ShapeDtypeStruct((), jnp.int32)
        text = jax.jit(sharded).lower(x, steps).compile().as_text()
    size = 4 * 32 * 4
    counted = Module(text, {"data": 2, "fsdp": 2, "tensor": 1}).collectives()
    assert {key: tuple(numbers) for key, numbers in counted.items()} == {
        ("all-reduce", "fsdp", False): (5, 5 * size),
        ("all-gather", "data", False): (1, 2 * size),
        ("all-reduce", "data x fsdp", True): (1, 2 * size),
        ("collective-permute", "data", False): (1, 2 * size),
    }


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
        ("replica_groups=mesh['a'=2,'b'=2], device_ids=([2,2]T(1,0)) {'a'}, x", [[0, 1], [2, 3]]),
        ("replica_groups={}, x", [[0, 1, 2, 3]]),
    ],
)
def test_groups_of_a_collective(text, groups):
    assert [group.tolist() for group in groups_of(text, 4)] == groups

"""What processes share, seen from one; test_distributed.py runs two."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from specrl_jax import hosts, sharding


def test_one_process_is_the_primary_and_has_all(make_mesh):
    with jax.set_mesh(make_mesh(4, 1, 1)):
        array = sharding.put(np.arange(8), "batch")
        assert not array.is_fully_replicated
        fetched = hosts.fetch({"rows": array, "host": np.ones(2)})
    np.testing.assert_array_equal(fetched["rows"], np.arange(8))
    assert type(fetched["rows"]) is type(fetched["host"]) is np.ndarray
    assert hosts.is_primary()
    value = object()
    assert hosts.gather(value) == [value]
    assert hosts.broadcast(value) is value
    assert hosts.on_primary(max, 3, 4) == 4


def test_values_are_placed_as_device_put_does(mesh):
    layout = jax.sharding.NamedSharding(mesh, jax.P())
    for value in (np.arange(3), np.float64(0.5), jnp.ones(2, jnp.bfloat16)):
        one, two = hosts.place(value, layout), jax.device_put(value, layout)
        assert (one.dtype, one.sharding) == (two.dtype, two.sharding)


@pytest.mark.parametrize("count", [0, 1, 7, 8])
def test_parts_are_even_and_everything(monkeypatch, count):
    monkeypatch.setattr(jax, "process_count", lambda: 3)
    parts = []
    for index in range(3):
        monkeypatch.setattr(jax, "process_index", lambda index=index: index)
        parts.append(list(range(count))[hosts.own_part(count)])
    assert [x for part in parts for x in part] == list(range(count))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_processes_that_differ_are_named(monkeypatch):
    monkeypatch.setattr(hosts, "gather", lambda value: [value, value, value | {"b": 3}])
    with pytest.raises(
        ValueError, match=r"^b must be .*, got 2 in process 0 and 3 in process 2; x$"
    ):
        hosts.check_same({"a": 1, "b": 2}, "x")

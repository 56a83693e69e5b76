"""Thousands of configurations drawn by Hypothesis, most of them meaningless.

Each is either rejected by a one-line error that names a field, or everything computed from it
before anything is loaded can be computed.
"""

import functools
import math
import re

import hypothesis
import small_runs
from hypothesis import strategies as st
from small_models import MODEL

from specrl_jax.algorithms.update_spec import make_schedule
from specrl_jax.config import flatten
from specrl_jax.recipes.waiting_groups import part_size
from specrl_jax.rollout.generate import RolloutSpec
from specrl_jax.settings import schema

SCHEMA = schema()

CONFIGURATIONS = 1_000
FIELDS = dict(flatten(small_runs.small_config()))
EXTREME_INTS = st.sampled_from([-(2**63), -1, 0, 2**31 - 1, 2**31, 10**15, 2**64, 10**400])
EXTREME_FLOATS = st.sampled_from([0.0, -1.0, 1e-300, 1e300, math.inf, -math.inf, math.nan])
ANYTHING = st.sampled_from([None, "", "x", [], (), {}, 1j, b"x", True, 3, 0.5])
KINDS = {
    bool: st.booleans(),
    int: st.integers(0, 16) | EXTREME_INTS,
    float: st.floats(0, 2) | st.floats() | EXTREME_FLOATS,
    str: st.text(max_size=8),
}


def _values(field: str) -> st.SearchStrategy:
    names = SCHEMA.fields[field].kind.choices() if field in SCHEMA.fields else ()
    known = st.sampled_from(names) if names else st.just(FIELDS[field])
    # Mostly of the right kind, so that the rules between fields are reached too.
    likely = known | KINDS[type(FIELDS[field])]
    return st.one_of(known, likely, likely, likely, ANYTHING)


CHANGE = {field: st.tuples(st.just(field), _values(field)) for field in sorted(FIELDS)}
CHANGES = st.lists(st.sampled_from(list(CHANGE)).flatmap(CHANGE.get), max_size=6)


def _compute(config) -> None:
    """What a run computes from a configuration alone; a one-line ValueError if it can't."""
    settings = config.rollout
    spec = RolloutSpec.from_config(config, MODEL, eos_ids=(1,), pad_id=0)
    buckets = spec.buckets((settings.prompts_per_step + settings.partial) * settings.group_size)
    assert buckets.widths[0] == 1
    # Every row has a place, in the cache and in the packed sequences of `prefill`.
    longest = config.data.prompt_len + settings.response_len
    rows = buckets.sizes[0]
    assert min(buckets.cache_slots, buckets.sequence_slots) >= longest
    assert buckets.chunks * buckets.chunk_sequences * buckets.sequence_slots >= longest * rows
    assert rows >= buckets.block_rows > 0
    part_size(config)
    schedule = make_schedule(config.updates, max(config.train.steps, 1))
    assert math.isfinite(float(schedule(0)))


def test_every_configuration_is_refused_in_one_line_or_can_be_computed_with(mesh):
    ends = {"refused": 0, "computed": 0}
    run = functools.partial(_try, small_runs.small_config(), ends)
    limits = hypothesis.settings(
        max_examples=CONFIGURATIONS, deadline=None, derandomize=True, database=None,
        suppress_health_check=list(hypothesis.HealthCheck),
        phases=[hypothesis.Phase.generate, hypothesis.Phase.shrink],
    )  # fmt: skip
    limits(hypothesis.given(CHANGES)(lambda changes: run(dict(changes))))()
    assert sum(ends.values()) >= CONFIGURATIONS
    assert min(ends.values()) > CONFIGURATIONS // 20, ends


def _try(config, ends: dict[str, int], changes: dict) -> None:
    for field, value in changes.items():
        small_runs.set_field(config, field, value)
    line = _refusal(config)
    for field in changes:
        small_runs.set_field(config, field, FIELDS[field])
    ends["refused" if line else "computed"] += 1
    if line:
        assert re.match(r"[a-z_]+(\.\w+)*[ =:].*\bmust\b", line), line
        assert "\n" not in line
        assert len(line) < 600


def _refusal(config) -> str:
    """The error of a configuration, "" where it has none."""
    try:
        SCHEMA.validate(config)
        _compute(config)
    except ValueError as error:
        return str(error)
    return ""

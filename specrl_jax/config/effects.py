"""Fields that do nothing in a configuration, and the flags that would give them an effect."""

from ml_collections import ConfigDict

from specrl_jax.config.fields import FIELDS, OPTIONS, When
from specrl_jax.config.kinds import get


def without_effect(config: ConfigDict, field: str) -> str:
    """Say in one line that a field does nothing in a configuration, and what would give it an
    effect; "" where it does something, or its value is what holds anyway."""
    row = FIELDS.get(field)
    if row and row.idle is not None and get(config, field) == row.idle:
        return ""
    conditions = row.when if row else OPTIONS.get(field.rpartition(".")[0], ())
    for when in conditions:
        if not when.holds(config):
            now = get(config, when.field)
            shown = repr(now) if now == "" else now
            flag = f"--config.{when.field}={_remedy(config, when)}"
            return f"{field} has no effect with {when.field} = {shown}; add {flag}"
    return ""


def _remedy(config: ConfigDict, when: When) -> str:
    """Return the value of `when.field` under which the condition holds."""
    if when.value is not None:
        return when.value
    section, _, name = when.field.partition(".")
    tried = config.copy_and_resolve_references()
    for choice in FIELDS[when.field].kind.choices():
        tried[section][name] = choice
        if when.holds(tried):
            return choice
    raise AssertionError(f"no choice of {when.field} gives an effect")

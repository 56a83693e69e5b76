"""Configuration of a run: what its fields may hold, and how programs read it.

`fields` has a row for each field of configs/grpo.py, `cross_rules` the rules between them, `cli`
the flags. `validate`, `check_mesh` and `check_version` raise ValueError in one line, before
anything is loaded or compiled.
"""

from collections.abc import Collection, Iterable, Mapping
from typing import Any

from ml_collections import ConfigDict

from specrl_jax.config.cross_rules import RULES
from specrl_jax.config.fields import FIELDS, OPTIONS, without_effect
from specrl_jax.config.kinds import flatten

_OF_OPTIONS = tuple(f"{section}." for section in OPTIONS)
_OPTIONAL = (*_OF_OPTIONS, "resume_from")  # which is of the command line


def validate(config: ConfigDict, given: Collection[str] = ()) -> None:
    """Raise ValueError in one line on the first rule that a whole configuration breaks.

    given: the fields that the user has set, each of which must have an effect.
    """
    values = dict(flatten(config))
    if missing := sorted(FIELDS.keys() - values.keys()):
        raise ValueError(f"{missing[0]} must be set ({len(missing)} missing); see configs/grpo.py")
    unknown = sorted(x for x in values.keys() - FIELDS.keys() if not x.startswith(_OF_OPTIONS))
    if unknown:
        raise ValueError(f"{unknown[0]} is not a field of the config; see configs/grpo.py")
    for field, row in FIELDS.items():
        _require(field, row.kind.broken(values[field]), values[field])
    for field in given:
        if line := without_effect(config, field):
            raise ValueError(line)
    for rules in RULES:
        for field, rule, holds in rules(config):
            _require(field, "" if holds else rule, values[field])


def _require(field: str, broken: str, value: Any) -> None:
    if broken:
        text = " ".join(repr(value).split())
        shown = text if len(text) <= 200 else f"{text[:200]}.."
        raise ValueError(f"{field} must be {broken}, got {shown}")


def check_version(saved: Iterable[str], known: Iterable[str], where: str) -> None:
    """Raise ValueError in one line where a saved configuration has other fields than are known now.

    Fields that no version requires are not compared.
    """
    before = {name for name in saved if not name.startswith(_OPTIONAL)}
    now = {name for name in known if not name.startswith(_OPTIONAL)}
    differs = [f"{name} came later" for name in sorted(now - before)]
    differs += [f"{name} is no field any more" for name in sorted(before - now)]
    if differs:
        raise ValueError(
            f"{where} is of another version of specrl_jax: {', '.join(differs)}; go on with that "
            "version, or begin a new run"
        )


def check_mesh(config: ConfigDict, mesh: Any, rollout_mesh: Any = None) -> None:
    """Check batch sizes against the mesh; ValueError in one line that says what would fit.

    rollout_mesh: of rollouts; None: the same.
    """
    by_update = {
        "updates.mini_batch_size": config.updates.mini_batch_size,
        "warmup.batch_size": config.warmup.batch_size if config.warmup.steps else 0,
    }
    by_rollout = {
        "rollout.prompts_per_step": config.rollout.prompts_per_step,
        "rollout.partial": config.rollout.partial,
        "evaluate.batch_size": config.evaluate.batch_size if config.evaluate.every else 0,
    }
    _check_shards(by_rollout | by_update, mesh, "mesh.data x mesh.fsdp")
    if rollout_mesh not in (None, mesh):
        _check_shards(by_rollout, rollout_mesh, "mesh.rollout_devices / mesh.tensor")


def _check_shards(sizes: Mapping[str, int], mesh: Any, fields: str) -> None:
    shards = mesh.shape["data"] * mesh.shape["fsdp"]
    for field, size in sizes.items():
        if size % shards:
            below = size // shards * shards
            above = below + shards
            fits = f"{below} or {above} fits" if below else f"{above} fits"
            _require(field, f"divisible by {fields} = {shards} ({fits})", size)

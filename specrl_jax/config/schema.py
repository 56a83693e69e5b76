"""All fields and rules of a configuration, gathered from the subpackages (`Schema`)."""

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

from ml_collections import ConfigDict

from specrl_jax.config.fields import Field, Rules, Section, Values, When
from specrl_jax.config.kinds import Kind, flatten, get

ORIGIN = "resume_from"  # of the command line, saved with the fields of a run
_SEE = "docs/fields.md"


class Schema:
    """Fields by their paths, and the rules for a whole configuration.

    Its checks raise a one-line ValueError, before anything is loaded or compiled.
    """

    def __init__(
        self,
        sections: Sequence[Section],
        rules: Sequence[Rules] = (),
        effects: Sequence[Mapping[When, When]] = (),
        renamed: Mapping[str, str] | None = None,
    ):
        """Take sections and rules in the order in which they are shown and checked.

        effects: conditions, and others with the same effect. renamed: new names of fields by their
        old ones.
        """
        self.sections = tuple(sections)
        self.rules = tuple(rules)
        self.effects = tuple(effects)
        self.renamed = dict(renamed or {})
        self.fields: dict[str, Field] = {}
        for section in sections:
            paths = {} if section.free else section.paths()
            if twice := sorted(paths.keys() & self.fields.keys()):
                raise ValueError(f"{twice[0]} must be declared once, got two rows")
            self.fields |= paths
        self._kinds = {name: row.kind for name, row in self.fields.items()}
        # Sections whose field names are the user's: when they have an effect.
        self.options: dict[str, tuple[When, ...]] = {
            x.path: (x.on,) if x.on else () for x in sections if x.free
        }

    # What is declared -----------------------------------------------------------------------------

    def comments(self) -> dict[str, str]:
        """Return the comment of every field, and of options with a default.

        The names that recipes have added to a table of choices are appended, each with its file.
        """
        rows = {name: row for x in self.sections for name, row in x.paths().items()}
        return {name: " | ".join([row.comment, *_added(row.kind)]) for name, row in rows.items()}

    def defaults(self) -> ConfigDict:
        """Return a configuration of all fields with their defaults."""
        config = ConfigDict()
        for section in self.sections:
            inner = config
            for part in filter(None, section.path.split(".")):
                if part not in inner:
                    inner[part] = ConfigDict()
                inner = inner[part]
            for row in section.fields:
                inner[row.name] = row.default
        return config

    def values(self, config: ConfigDict) -> Values:
        """Return the values of a configuration in the form that conditions and rules read."""
        return Values(config, self._kinds)

    def may_change(self, *who: str) -> tuple[str, ...]:
        """Return the fields that these may change; a section means all of its fields."""
        names: list[str] = []
        for section in dict.fromkeys(field.partition(".")[0] for field in self.fields):
            fields = [field for field in self.fields if field.split(".")[0] == section]
            free = [field for field in fields if self.fields[field].may_change in who]
            names += [section] if free == fields else free
        return tuple(names)

    def of_task(self) -> dict[str, Any]:
        """Return the fields that belong to a task, with their values when none is chosen."""
        return {name: row.task for name, row in self.fields.items() if row.task is not None}

    def unknown(self, name: str) -> str:
        """Return the error line for a name that is not a field."""
        if new := self.renamed.get(name):
            return f"{name} is now {new}"
        return f"{name} is not a field of the config; see {_SEE}"

    # Checks ---------------------------------------------------------------------------------------

    def validate(self, config: ConfigDict, given: Collection[str] = ()) -> None:
        """Raise a one-line ValueError on the first rule that a whole configuration breaks.

        given: the fields set by the user, each of which must have an effect.
        """
        values = dict(flatten(config))
        if missing := sorted(self.fields.keys() - values.keys()):
            raise ValueError(f"{missing[0]} must be set ({len(missing)} missing); see {_SEE}")
        for name in sorted(values.keys() - self.fields.keys()):
            if not self._is_option(name):
                raise ValueError(self.unknown(name))
        for name, row in self.fields.items():
            _require(name, row.kind.broken(values[name]), values[name])
        for name in given:
            if line := self.without_effect(config, name):
                raise ValueError(line)
        read = self.values(config)
        for rules in self.rules:
            for name, rule, holds in rules(read):
                _require(name, "" if holds else rule, values.get(name))

    def without_effect(self, config: ConfigDict, field: str) -> str:
        """Return in one line that a field has no effect in a configuration, and what would give it
        one; "" if it has an effect, or its value is the effective one anyway."""
        row = self.fields.get(field)
        if row and row.neutral is not None and get(config, field) == row.neutral:
            return ""
        conditions = row.when if row else self.options.get(field.rpartition(".")[0], ())
        for when in conditions:
            if not self.holds(when, config):
                return f"{field} has no effect {self._advice(config, when)}"
        return ""

    def holds(self, when: When, config: ConfigDict) -> bool:
        """Return whether a condition holds, or another with the same effect."""
        values = self.values(config)
        return any(x.holds(values) for x in (when, *self._others(when)))

    def _others(self, when: When) -> list[When]:
        return [others[when] for others in self.effects if when in others]

    def _advice(self, config: ConfigDict, when: When) -> str:
        """Return which field prevents a condition, and what value would help, if any."""
        named = [x for x in (when, *self._others(when)) if x.field]
        better = {x: self.remedy(config, x) for x in named}
        named.sort(key=lambda x: better[x] is None)
        if not named:
            return "here"
        first = named[0]
        now = get(config, first.field)
        words = f"with {first.field} = {now!r}" if now == "" else f"with {first.field} = {now}"
        help_ = better[first]
        return words if help_ is None else f"{words}; add --config.{first.field}={help_}"

    def remedy(self, config: ConfigDict, when: When) -> str | None:
        """Return the value of `when.field` that satisfies the condition, if any."""
        if when.value is not None:
            return when.value
        section, _, name = when.field.rpartition(".")
        tried = config.copy_and_resolve_references()
        for choice in self.fields[when.field].kind.choices():
            get(tried, section)[name] = choice
            if when.holds(self.values(tried)):
                return choice
        return None

    def check_version(self, saved: Iterable[str], where: str, known: Iterable[str] = ()) -> None:
        """Raise a one-line ValueError if a saved configuration has other fields than the known.

        known: by default those of the schema. Fields that no version requires are not compared.
        """
        before = {name for name in saved if not self._is_optional(name)}
        now = {name for name in known or self.fields if not self._is_optional(name)}
        differs = [f"{name} was added later" for name in sorted(now - before)]
        differs += [
            f"{name} is now {self.renamed[name]}"
            if name in self.renamed
            else f"{name} no longer exists"
            for name in sorted(before - now)
        ]
        if differs:
            raise ValueError(
                f"{where} is from another version of specrl_jax: {', '.join(differs)}; continue "
                "with that version, or start a new run"
            )

    def check_mesh(self, config: ConfigDict, mesh: Any, rollout_mesh: Any = None) -> None:
        """Check batch sizes against the mesh; a one-line ValueError names sizes that would fit.

        rollout_mesh: of rollouts; None: the same.
        """
        _check_shards(self._sizes(config, "rollout"), mesh, "mesh.data x mesh.fsdp")
        _check_shards(self._sizes(config, "update"), mesh, "mesh.data x mesh.fsdp")
        if rollout_mesh not in (None, mesh):
            fields = "mesh.rollout_devices / mesh.tensor"
            _check_shards(self._sizes(config, "rollout"), rollout_mesh, fields)

    def _sizes(self, config: ConfigDict, mesh: str) -> dict[str, int]:
        """Return the sizes in use that a mesh divides, by field."""
        return {
            name: get(config, name)
            for name, row in self.fields.items()
            if row.shards
            and row.shards.mesh == mesh
            and (row.shards.when is None or self.holds(row.shards.when, config))
        }

    def _is_option(self, name: str) -> bool:
        return name.startswith(tuple(f"{path}." for path in self.options))

    def _is_optional(self, name: str) -> bool:
        return name == ORIGIN or self._is_option(name)


def _require(field: str, broken: str, value: Any) -> None:
    if broken:
        text = " ".join(repr(value).split())
        shown = text if len(text) <= 200 else f"{text[:200]}.."
        raise ValueError(f"{field} must be {broken}, got {shown}")


def _check_shards(sizes: Mapping[str, int], mesh: Any, fields: str) -> None:
    shards = mesh.shape["data"] * mesh.shape["fsdp"]
    for field, size in sizes.items():
        if size % shards:
            below = size // shards * shards
            above = below + shards
            fits = f"{below} or {above} fits" if below else f"{above} fits"
            _require(field, f"divisible by {fields} = {shards} ({fits})", size)


def _added(kind: Kind) -> list[str]:
    names = getattr(kind.table(), "added", {})
    return [x if x == file else f"{x} ({file}.py)" for x, file in names.items()]

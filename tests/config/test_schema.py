"""How sections become one schema, and what it reports about unknown names."""

import dataclasses

import pytest
from ml_collections import ConfigDict
from small_runs import line_of

from specrl_jax.config.fields import RESUMED, Section, Shards, When, field, filled
from specrl_jax.config.kinds import SWITCH, choice, integer, text_or
from specrl_jax.config.schema import Schema

COLOURS = {"red": 1, "blue": 2}
ON = When("lamp.size", lambda c: c.lamp.size > 0, "3")
NEVER = When("", lambda c: False)
LAMP = Section(
    "lamp",
    "a light",
    (
        field("size", 0, "in mm", integer()),
        field("colour", "red", "of the light", choice(lambda: COLOURS), may_change=RESUMED),
        field("shade", "", "of glass", text_or(lambda: COLOURS), NEVER, neutral=""),
    ),
    on=ON,
)
ROWS = field("rows", 4, "of it", integer(), shards=Shards("update", ON))
BULB = Section("lamp.bulb", "", (ROWS,))
FREE = Section("lamp.words", "", (field("one", 1, "of mine"),), on=ON, free=True)


def _schema(*more: Section, **other) -> Schema:
    return Schema([LAMP, BULB, FREE, *more], **other)


def test_defaults_and_comments_are_those_of_the_sections():
    values = {"size": 0, "colour": "red", "shade": "", "bulb": {"rows": 4}, "words": {"one": 1}}
    assert _schema().defaults().to_dict() == {"lamp": values}
    assert list(_schema().comments().values()) == ["in mm", "of the light", "of glass", "of it",
                                                   "of mine"]  # fmt: skip
    assert list(_schema().fields) == ["lamp.size", "lamp.colour", "lamp.shade", "lamp.bulb.rows"]
    assert _schema().options == {"lamp.words": (ON,)}


def test_a_section_may_add_to_a_path():
    schema = _schema(Section("lamp", "", (field("more", True, "light", SWITCH),)))
    assert schema.defaults().lamp.more is True
    with pytest.raises(ValueError, match=r"lamp\.colour must be declared once, got two rows"):
        _schema(LAMP)


def test_where_a_section_is_off_its_fields_have_no_effect_but_the_one_that_turns_it_on():
    schema = _schema()
    config = schema.defaults()
    said = "has no effect with lamp.size = 0; add --config.lamp.size=3"
    for name in ("lamp.colour", "lamp.words.one"):
        assert schema.without_effect(config, name) == f"{name} {said}"
    assert schema.without_effect(config, "lamp.size") == ""
    config.lamp.size = 1
    assert schema.without_effect(config, "lamp.colour") == ""


def test_another_condition_may_give_the_same_effect():
    config = _schema().defaults()
    config.lamp.update(size=1, shade="green")
    assert _schema().without_effect(config, "lamp.shade") == "lamp.shade has no effect here"
    blue = When("lamp.colour", lambda c: c.meaning("lamp.colour") == 2)
    schema = _schema(effects=[{NEVER: blue}])
    line = "lamp.shade has no effect with lamp.colour = red; add --config.lamp.colour=blue"
    assert schema.without_effect(config, "lamp.shade") == line
    config.lamp.colour = "blue"
    assert schema.without_effect(config, "lamp.shade") == ""


def test_no_choice_may_give_an_effect():
    green = When("lamp.colour", lambda c: c.meaning("lamp.colour") == 3)
    schema = _schema(Section("lamp", "", (field("leaf", 0, "of it", integer(), green),)))
    line = "lamp.leaf has no effect with lamp.colour = red"
    assert schema.without_effect(schema.defaults(), "lamp.leaf") == line


def test_names_that_are_no_field_any_more():
    schema = _schema(renamed={"light.size": "lamp.size"})
    config = schema.defaults()
    config.light = ConfigDict({"size": 1})
    assert line_of(schema.validate, config) == "light.size is now lamp.size"
    known = set(schema.fields)
    schema.check_version(known | {"resume_from", "lamp.words.two"}, "x.json")
    line = line_of(schema.check_version, known - {"lamp.size"} | {"light.size", "gone"}, "x.json")
    assert line == (
        "x.json is from another version of specrl_jax: lamp.size was added later, gone no longer "
        "exists, light.size is now lamp.size; continue with that version, or start a new run"
    )


def test_values_of_a_field_that_nobody_declares():
    values = _schema().values(_schema().defaults())
    assert values.get("lamp.size") == 0
    assert values.get("lamp.none") is None
    assert values.get("lamp.none", 7) == 7
    assert values.meaning("lamp.shade") is None  # any text may be given


def test_a_spec_is_filled_from_its_section():
    @dataclasses.dataclass(frozen=True)
    class Lamp:
        colour: str
        size: int
        model: str
        watts: int = 5

    section = _schema().defaults().lamp
    assert filled(Lamp, section, model="a") == Lamp("red", 0, "a")
    assert filled(Lamp, section, model="a", size=2) == Lamp("red", 2, "a")

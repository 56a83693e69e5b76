"""All declarations of subpackages and recipes are gathered, without slow imports."""

import pathlib
import subprocess
import sys

import pytest

from specrl_jax import registry, settings
from specrl_jax.config.fields import Section
from specrl_jax.config.schema import Schema

CONFIG = pathlib.Path(settings.__file__).parent / "config"


def test_every_section_of_a_room_is_gathered():
    declared = [x for room in settings.ROOMS for x in vars(room).values() if isinstance(x, Section)]
    assert len(declared) == len(settings.SECTIONS)
    assert {*map(id, declared)} == {*map(id, settings.SECTIONS)}


def test_the_rooms_declare_without_jax():
    code = "import sys, specrl_jax.settings; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_kinds_of_fields_find_no_module_by_its_name():
    for file in CONFIG.glob("*.py"):
        assert "import_module" not in file.read_text(), file.name


@pytest.mark.parametrize("name", ["SECTIONS", "RULES"])
def test_recipes_declare_tuples(name):
    for declared in registry.declared(name):
        assert isinstance(declared, tuple)
        assert declared


def test_conditions_that_recipes_give_are_those_of_a_room():
    rows = Schema(settings.SECTIONS).fields.values()
    conditions = {when for row in rows for when in row.when}
    assert {when for effects in registry.declared("EFFECTS") for when in effects} <= conditions


def test_a_renamed_field_is_a_field_under_its_new_name_alone():
    schema = settings.schema()
    assert {*schema.renamed.values()} <= schema.fields.keys()
    assert schema.fields.keys().isdisjoint(schema.renamed)

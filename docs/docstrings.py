"""Docstrings as Markdown, for the reference: an extension of griffe, which mkdocstrings reads.

Lines "name: what it is" become a list, one argument an item. An attribute without a docstring gets
the comment on its line, and a class lists its fields in its docstring.
"""

import re

from griffe import Attribute, Class, Docstring, Extension, Object

# "mask: bool [B, R]." or "embed_dim, mlp_dim: .."; a sentence starts with a capital.
_ARGUMENT = re.compile(r"(?m)^([a-z_][\w.]*(?:, [a-z_][\w.]*)*):(?= )")


class MarkdownDocstrings(Extension):
    """Rewrites the docstrings of what is documented."""

    def on_instance(self, *, obj: Object, **_: object) -> None:
        if obj.docstring:
            obj.docstring.value = as_markdown(obj.docstring.value)

    def on_attribute_instance(self, *, attr: Attribute, **_: object) -> None:
        comment = re.search(r"  # (.*)$", attr.lines_collection[attr.filepath][attr.lineno - 1])
        if comment and not attr.docstring:
            attr.docstring = Docstring(comment[1], parent=attr)

    def on_class_members(self, *, cls: Class, **_: object) -> None:
        """A line a field in place of a heading each."""
        fields = [a for a in cls.attributes.values() if a.annotation and a.name in cls.members]
        lines = []
        for field in fields:
            cls.del_member(field.name)
            meaning = f": {field.docstring.value}" if field.docstring else ""
            lines.append(f"* **`{field.name}`** `{field.annotation}`{meaning}")
        if lines and cls.docstring:
            cls.docstring.value += "\n\n" + "\n".join(lines)


def as_markdown(text: str) -> str:
    """A docstring whose paragraphs of arguments are lists."""
    paragraphs = text.split("\n\n")
    return "\n\n".join(
        _ARGUMENT.sub(r"* **`\1`**:", p) if _ARGUMENT.match(p) else p for p in paragraphs
    )

"""Writes pages of the reference as text, for those who read them in a clone.

On the site Sphinx writes them from the directives in a page's comment `<!-- site ... -->`
(`site_extension.py`). In the file these are invisible, and the text between the comments
`<!-- generated: api 1 -->` and `<!-- end: api 1 -->` says the same.
"""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
REFERENCE = ROOT / "docs" / "reference"

SITE = re.compile(r"<!-- site\n(.*?)-->\n", re.DOTALL)
"""A comment with what only the site shows."""
TEXT = re.compile(r"<!-- generated: api \d+ -->.*?<!-- end: api \d+ -->\n", re.DOTALL)
"""What only the file shows."""

_DIRECTIVE = re.compile(
    r"^\.\. (currentmodule|autoclass|autofunction):: (\S+)\n((?: +:.*\n)*)", re.M
)
_SECTION = re.compile(r"(Args|Attributes|Returns|Yields|Raises|Example|Examples):")
_ENTRY = re.compile(r"(?P<name>\*{0,2}[\w., ]+?)(?P<more> \(.*?\))?: (?P<text>.*)", re.DOTALL)


class _Bare:
    """An annotation as it stands in the source."""

    def __init__(self, text: object) -> None:
        self._text = text

    def __repr__(self) -> str:
        return str(self._text)


def for_site(source: str) -> str:
    """Returns a page as the site reads it: the directives, and no text."""
    return TEXT.sub("", SITE.sub(r"\1", source))


def regions() -> Iterator[tuple[str, str, Callable[[], str]]]:
    """Yields each page with such comments, the name of each region of it, and what writes it."""
    for page in sorted(REFERENCE.glob("*.md")):
        blocks = SITE.findall(page.read_text(encoding="utf-8"))
        for number, block in enumerate(blocks, 1):
            name = str(page.relative_to(ROOT))
            yield name, f"api {number}", lambda block=block: text_of(block)


def text_of(directives: str) -> str:
    """Returns the text of what the directives name."""
    module, parts = "", []
    for kind, name, options in _DIRECTIVE.findall(directives):
        if kind == "currentmodule":
            module = name
            continue
        whole = name if name.startswith("trireme.") else f"{module}.{name}"
        parts += [f"### `{whole.removeprefix('trireme.')}`", *_described(_found(whole), whole)]
        if kind == "autoclass" and ":members:" in options:
            for member, value in _members(_found(whole), options):
                short = f"{whole.rpartition('.')[2]}.{member}"
                parts += [f"#### `{short}`", *_described(value, short)]
    return "\n\n".join(parts)


def _found(name: str) -> Any:
    path, _, last = name.rpartition(".")
    return getattr(importlib.import_module(path), last)


def _members(owner: type, options: str) -> Iterator[tuple[str, Any]]:
    """Yields the public members of a class that have a docstring, in the order of the source."""
    left_out = re.findall(r":exclude-members: (.*)", options)
    excluded = {name.strip() for line in left_out for name in line.split(",")}
    special = {
        n.strip()
        for line in re.findall(r":special-members: (.*)", options)
        for n in line.split(",")
    }
    classes = owner.__mro__ if ":inherited-members:" in options else (owner,)
    seen: set[str] = set()
    for each in classes:
        if not each.__module__.startswith("trireme"):
            continue
        for name, value in vars(each).items():
            public = not name.startswith("_") or name in special
            documented = inspect.isroutine(value) or isinstance(value, property | classmethod)
            if public and documented and name not in seen | excluded and inspect.getdoc(value):
                seen.add(name)
                yield name, value.__func__ if isinstance(value, classmethod) else value


def _described(value: Any, name: str) -> Iterator[str]:
    """Yields the signature and the paragraphs of an object's docstring."""
    if not isinstance(value, property):
        yield f"```python\n{name.rpartition('.')[2]}{_signature(value)}\n```"
    yield from _paragraphs(inspect.getdoc(value) or "")


def _signature(value: Any) -> str:
    found = inspect.signature(value)
    parameters = [
        each.replace(annotation=_Bare(each.annotation))
        if each.annotation is not each.empty
        else each
        for each in found.parameters.values()
        if each.name not in ("self", "cls")
    ]
    back = found.return_annotation
    known = back is not found.empty and not inspect.isclass(value)
    text = str(
        found.replace(
            parameters=parameters, return_annotation=_Bare(back) if known else found.empty
        )
    )
    if len(text) <= 88:
        return text
    inside, _, after = text[1:].rpartition(")")
    return "(\n    " + re.sub(r", (?=\*?\*?\w+(?::|,|=|$))", ",\n    ", inside) + f",\n){after}"


def _paragraphs(text: str) -> Iterator[str]:
    """Yields the parts of a docstring as Markdown: its sections become lists."""
    lines = text.splitlines()
    position = 0
    plain: list[str] = []
    while position < len(lines):
        found = _SECTION.fullmatch(lines[position])
        if found is None:
            plain.append(lines[position])
            position += 1
            continue
        yield from _text(plain)
        end = position + 1
        while end < len(lines) and (not lines[end].strip() or lines[end].startswith(" ")):
            end += 1
        section = inspect.cleandoc("\n".join(["", *lines[position + 1 : end]]))
        yield f"*{found[1]}*"
        yield (
            section if found[1] in ("Returns", "Yields", "Example", "Examples") else _list(section)
        )
        plain, position = [], end
    yield from _text(plain)


def _text(lines: list[str]) -> Iterator[str]:
    if text := "\n".join(lines).strip("\n"):
        yield text.replace("::\n", ":\n")


def _list(section: str) -> str:
    items = re.split(r"\n(?=\S)", section)
    return "\n".join(_item(" ".join(item.split())) for item in items)


def _item(text: str) -> str:
    found = _ENTRY.fullmatch(text)
    return (
        f"- {text}"
        if found is None
        else f"- `{found['name']}`{found['more'] or ''}: {found['text']}"
    )

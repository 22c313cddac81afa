"""The messages on the page of troubleshooting are those of the program."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache

from tests.docs.pages import ROOT

PAGE = ROOT / "docs" / "troubleshooting.md"
_ROW = re.compile(r"^\| (`+)\s?(.+?)\s?\1 \|", re.MULTILINE)
_HOLE = "\0"


def messages() -> list[str]:
    """Returns every message on the page, with `…` for what differs."""
    return [text for _, text in _ROW.findall(PAGE.read_text(encoding="utf-8"))]


@cache
def source() -> str:
    """Returns every text of the program in one, with a hole for each value that is put in."""
    found: list[str] = []
    for path in sorted((ROOT / "trireme").rglob("*.py")):
        found += texts(ast.parse(path.read_text(encoding="utf-8")))
    return "\n\n".join(found)


def texts(tree: ast.AST) -> Iterator[str]:
    """Yields the texts below a node but for docstrings, those of an f-string as one."""
    if isinstance(tree, ast.Expr) and isinstance(tree.value, ast.Constant):
        return
    if isinstance(tree, ast.JoinedStr):
        yield "".join(
            part.value if isinstance(part, ast.Constant) else _HOLE  # type: ignore[misc]
            for part in tree.values
        )
    elif isinstance(tree, ast.Constant):
        if isinstance(tree.value, str):
            yield tree.value
        return
    for child in ast.iter_child_nodes(tree):
        if not (isinstance(tree, ast.JoinedStr) and isinstance(child, ast.Constant)):
            yield from texts(child)


def absent(message: str) -> list[str]:
    """Returns the parts of a message, between what differs, that the program does not have."""
    parts = [part.strip() for part in re.split(r"…|\.\.\.$", message)]
    return [part for part in parts if len(part) > 3 and part not in source()]


def test_there_are_many_messages_and_each_once() -> None:
    assert len(messages()) >= 80
    assert len(set(messages())) == len(messages())


def test_each_message_says_something() -> None:
    for message in messages():
        assert max(len(part) for part in message.split("…")) >= 5, message


def test_every_message_on_the_page_is_in_the_program() -> None:
    gone = {message: parts for message in messages() if (parts := absent(message))}
    assert gone == {}


def test_a_message_that_is_not_in_the_program_is_found() -> None:
    assert absent("the loss is …: lower the learning rate") == []
    assert absent("the loss is …: buy a larger computer") == [": buy a larger computer"]

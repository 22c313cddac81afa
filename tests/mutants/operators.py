"""What is changed in a file: mutmut's operators, and two of ours, on the statements that decide.

Nothing is changed in annotations, decorators, docstrings, assertions and text for people: no test
of what the program does could, or should, notice.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import libcst as cst
import libcst.matchers as m
from libcst.metadata import MetadataWrapper, ParentNodeProvider, PositionProvider
from mutmut.mutation.mutators import (
    mutation_operators,
    operator_arg_removal,
    operator_assignment,
    operator_keywords,
    operator_string,
)

NOTHING = cst.SimpleStatementLine([cst.Pass()])
NARROWING = {"cast", "isinstance", "len", "TypeVar", "Literal"}
"""Calls whose arguments are types, or cannot be left out."""

TYPE = m.Subscript(
    m.OneOf(*map(m.Name, ("Callable", "Literal", "Mapping", "Sequence", "dict", "list", "tuple")))
)
"""A type that is given a name."""


@dataclass(frozen=True)
class Mutant:
    """One file with one change.

    Attributes:
        path: the file, from the root of the repository.
        function: in which function, with its class; empty at the level of the module.
        line: where the change begins.
        lines: the lines of the statement that is changed, or of its head.
        before, after: the lines that differ, without indentation.
        order: by which a sample is drawn: the same for the same change at the same place.
        text: the whole file, changed.
        in_function: whether it is run when a function is called, not when the file is imported.
    """

    path: str
    function: str
    line: int
    lines: range
    before: str
    after: str
    order: str
    text: str
    in_function: bool

    @property
    def key(self) -> tuple[str, str, str, str]:
        """What names it, wherever in the file its function is."""
        return self.path, self.function, self.before, self.after


@dataclass(frozen=True)
class _Change:
    """A node of a file, and what takes its place."""

    path: str
    function: str
    node: cst.CSTNode
    instead: cst.CSTNode
    order: str


def sample(root: Path, paths: list[str], count: int, seed: int) -> list[Mutant]:
    """Draws mutants of files, in the order of files and lines.

    Which ones are drawn hangs on the seed and on the changes themselves: what is edited elsewhere
    draws no others, so that those of today are mostly those of tomorrow.
    """
    files = {path: _File(path, (root / path).read_text(encoding="utf-8")) for path in paths}
    changes = [change for file in files.values() for change in file.changes(seed)]
    drawn: list[Mutant] = []
    for change in sorted(changes, key=lambda change: change.order):
        if len(drawn) == count:
            break
        mutant = files[change.path].mutant(change)
        if mutant is not None:
            drawn.append(mutant)
    return sorted(drawn, key=lambda mutant: (mutant.path, mutant.line, mutant.order))


def mutants_of(path: str, text: str, seed: int = 0) -> list[Mutant]:
    """Returns every mutant of a file, in no order that means anything."""
    file = _File(path, text)
    return [mutant for mutant in map(file.mutant, file.changes(seed)) if mutant is not None]


class _File:
    """A file that is read once and changed many times."""

    def __init__(self, path: str, text: str) -> None:
        self.path = path
        self.text = text
        wrapper = MetadataWrapper(cst.parse_module(text))
        self.module = wrapper.module
        self.positions = wrapper.resolve(PositionProvider)
        self.parents = wrapper.resolve(ParentNodeProvider)

    def changes(self, seed: int) -> list[_Change]:
        """Returns every change that may be made, most of which are never spelt out."""
        seen: Counter[tuple[str, ...]] = Counter()
        found = []
        for function, node in _sites(self.module, ""):
            for instead in _replacements(node, self.parents):
                spelt = (function, self._code(node), self._code(instead))
                name = "|".join([str(seed), self.path, *spelt, str(seen[spelt])])
                seen[spelt] += 1
                order = hashlib.sha256(name.encode()).hexdigest()
                found.append(_Change(self.path, function, node, instead, order))
        return found

    def mutant(self, change: _Change) -> Mutant | None:
        """Spells a change out; None where it is no program, or the same."""
        text = self.module.deep_replace(change.node, change.instead).code  # type: ignore[arg-type]
        before, after = _difference(self.text, text)
        if before == after:
            return None
        try:
            compile(text, self.path, "exec")
        except SyntaxError:
            return None
        line = self.positions[change.node].start.line
        lines = self._statement(change.node)
        return Mutant(
            self.path,
            change.function,
            line,
            lines,
            before,
            after,
            change.order,
            text,
            self._in_body(change.node),
        )

    def _statement(self, node: cst.CSTNode) -> range:
        """Returns the lines of the statement that a node is in, or of its head."""
        while not isinstance(node, cst.BaseStatement | cst.Module | cst.Else):
            node = self.parents[node]
        place = self.positions[node]
        body = getattr(node, "body", None)
        last = place.end.line
        if isinstance(body, cst.IndentedBlock):
            last = max(place.start.line, self.positions[body.body[0]].start.line - 1)
        return range(place.start.line, last + 1)

    def _in_body(self, node: cst.CSTNode) -> bool:
        """Returns whether a node is in the body of a function; defaults of parameters are not."""
        while not isinstance(node, cst.Module | cst.ClassDef):
            parent = self.parents[node]
            if isinstance(parent, cst.FunctionDef) and node is parent.body:
                return True
            node = parent
        return False

    def _code(self, node: cst.CSTNode) -> str:
        return self.module.code_for_node(node)


def _sites(node: cst.CSTNode, function: str) -> Iterator[tuple[str, cst.CSTNode]]:
    """Yields every node that may be changed, with the function that it is in."""
    if isinstance(node, cst.Annotation | cst.Assert | cst.Import | cst.ImportFrom | cst.Decorator):
        return
    if m.matches(node, m.SimpleStatementLine([m.Expr(m.SimpleString() | m.ConcatenatedString())])):
        return
    if m.matches(node, m.Assign([m.AssignTarget(m.Name("__all__"))])):
        return
    if m.matches(node, m.If(m.Name("TYPE_CHECKING")) | m.Assign(value=TYPE)):
        return
    if isinstance(node, cst.ClassDef | cst.FunctionDef):
        function = f"{function}.{node.name.value}".strip(".")
        if isinstance(node, cst.FunctionDef):
            yield from _sites(node.params, function)
        yield from _sites(node.body, function)
        return
    yield function, node
    narrowing = isinstance(node, cst.Call) and _called(node) in NARROWING
    for child in node.children:
        if not narrowing:
            yield from _sites(child, function)


def _replacements(node: cst.CSTNode, parents: object) -> Iterator[cst.CSTNode]:
    """Yields what may stand in the place of a node."""
    if isinstance(node, cst.If):
        for word, operator in (("False", cst.And()), ("True", cst.Or())):
            test = cst.BooleanOperation(_bracketed(node.test), operator, cst.Name(word))
            yield node.with_changes(test=test)
    if isinstance(node, cst.BooleanOperation):
        yield from (node.left, node.right)
    if m.matches(node, m.SimpleStatementLine([m.Expr(m.Call())])):
        yield NOTHING.with_changes(leading_lines=node.leading_lines)  # type: ignore[attr-defined]
    for kind, operator in mutation_operators:
        if not isinstance(node, kind):
            continue
        if operator is operator_string:
            yield from _other_string(node)
        elif operator is operator_arg_removal:
            yield from _other_arguments(node)
        elif operator is operator_keywords and isinstance(node, cst.Break):
            yield cst.Pass()  # mutmut's return is mostly the same
        elif operator is operator_assignment:
            yield from _other_value(node)
        else:
            yield from operator(node)


def _other_string(node: cst.BaseString) -> Iterator[cst.CSTNode]:
    """One change of a word is enough; text of several words is for people."""
    if isinstance(node, cst.SimpleString) and " " not in node.value:
        yield next(iter(operator_string(node)), node)


def _other_value(node: cst.Assign | cst.AnnAssign) -> Iterator[cst.CSTNode]:
    """None for a value, but not for one that is as false."""
    if node.value is not None and not m.matches(node.value, m.Name("None") | m.Name("False")):
        yield from operator_assignment(node)


def _other_arguments(node: cst.Call) -> Iterator[cst.CSTNode]:
    """None for one given by place, nothing for one given by name.

    The others would be errors of Python, which any test finds.
    """
    if _called(node) in NARROWING:
        return
    for changed in operator_arg_removal(node):
        left_out = len(changed.args) < len(node.args)
        gone = next(a for a in node.args if a not in changed.args)
        if gone.keyword is not None and gone.keyword.value == "strict":
            continue  # of zip: an assertion
        if left_out == (gone.keyword is not None):
            yield changed


def _called(node: cst.Call) -> str:
    name = node.func.attr if isinstance(node.func, cst.Attribute) else node.func
    return name.value if isinstance(name, cst.Name) else ""


def _bracketed(node: cst.BaseExpression) -> cst.BaseExpression:
    return node.with_changes(
        lpar=[cst.LeftParen(), *node.lpar], rpar=[*node.rpar, cst.RightParen()]
    )


def _difference(before: str, after: str) -> tuple[str, str]:
    """Returns the lines that differ between two texts, without indentation, joined."""
    old, new = before.splitlines(), after.splitlines()
    first = 0
    while first < min(len(old), len(new)) and old[first] == new[first]:
        first += 1
    last = 0
    while last < min(len(old), len(new)) - first and old[-1 - last] == new[-1 - last]:
        last += 1
    parts = (old[first : len(old) - last], new[first : len(new) - last])
    old_lines, new_lines = ([line.strip() for line in part] for part in parts)
    return " ".join(old_lines), " ".join(new_lines)

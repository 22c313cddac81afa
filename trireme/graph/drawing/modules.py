"""The nodes of a picture by the modules of the model, with totals."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby

from trireme.graph.drawing.picture import Node


@dataclass(frozen=True, slots=True)
class Totals:
    """What some nodes cost together, for one micro-batch."""

    operators: int  # how many of them are operators
    forward_seconds: float  # the duration of their forward computations
    backward_seconds: float  # the duration of their backward computations
    resident_bytes: int  # their parameters, gradients and optimizer state
    activation_bytes: int  # what they keep from forward to backward
    # where they are, in the order of the nodes; without what each task computes
    places: tuple[str, ...]

    @classmethod
    def of(cls, nodes: Sequence[Node]) -> Totals:
        """Returns the totals of some nodes."""
        return cls(
            sum(node.is_operator for node in nodes),
            sum(node.forward_seconds for node in nodes),
            sum(node.backward_seconds for node in nodes),
            sum(node.resident_bytes for node in nodes),
            sum(node.activation_bytes for node in nodes),
            tuple(dict.fromkeys(node.place for node in nodes if node.place)),
        )


@dataclass(frozen=True)
class Module:
    """A module with its own nodes and the modules in it, each where its first node is."""

    scope: str  # its path, with dots; "" for the model
    items: tuple[Node | Module, ...]  # its nodes and modules, in the order of execution

    @property
    def name(self) -> str:
        """The last part of its path."""
        return self.scope.rpartition(".")[2]

    @cached_property
    def nodes(self) -> tuple[Node, ...]:
        """All nodes in it and in the modules in it."""
        return tuple(
            node
            for item in self.items
            for node in (item.nodes if isinstance(item, Module) else (item,))
        )

    @cached_property
    def totals(self) -> Totals:
        """What these cost together."""
        return Totals.of(self.nodes)


@dataclass(frozen=True, slots=True)
class Row:
    """A line of the placement table: a module, or a run of nodes of one."""

    scope: str  # the path of the module; "" for the model
    nodes: tuple[Node, ...]  # the nodes
    whole: bool  # whether these are all nodes of the module

    @property
    def totals(self) -> Totals:
        """What they cost together."""
        return Totals.of(self.nodes)

    @property
    def label(self) -> str:
        """The name of the module, or the names of the first and last node after it."""
        if self.whole:
            return self.scope
        names = [node.name for node in self.nodes]
        run = names[0] if len(names) == 1 else f"{names[0]} to {names[-1]}"
        return f"{self.scope}: {run}" if self.scope else run


def module_tree(nodes: Iterable[Node]) -> Module:
    """Returns the model as modules in modules. A module that is called again is there once."""
    return _module("", [(node.path, node) for node in nodes])


def placement_rows(module: Module) -> Iterator[Row]:
    """Yields the rows of the placement table.

    A module whose nodes are in one place is one row, and so are consecutive nodes of a module.
    What each task computes for itself goes with its neighbours.
    """
    for single, items in groupby(module.items, key=lambda item: isinstance(item, Node)):
        if single:
            yield from _runs(module.scope, [item for item in items if isinstance(item, Node)])
            continue
        for item in items:
            assert isinstance(item, Module)
            if len(item.totals.places) <= 1:
                yield Row(item.scope, item.nodes, whole=True)
            else:
                yield from placement_rows(item)


def _runs(scope: str, nodes: Sequence[Node]) -> Iterator[Row]:
    run: list[Node] = []
    place = ""
    for node in nodes:
        if run and node.place and place and node.place != place:
            yield Row(scope, tuple(run), whole=False)
            run, place = [], ""
        run.append(node)
        place = place or node.place
    yield Row(scope, tuple(run), whole=False)


def _module(scope: str, members: Sequence[tuple[tuple[str, ...], Node]]) -> Module:
    inner: dict[str, list[tuple[tuple[str, ...], Node]]] = {}
    order: list[Node | str] = []
    for path, node in members:
        if not path:
            order.append(node)
            continue
        if path[0] not in inner:
            order.append(path[0])
        inner.setdefault(path[0], []).append((path[1:], node))
    prefix = f"{scope}." if scope else ""
    return Module(
        scope,
        tuple(
            _module(prefix + each, inner[each]) if isinstance(each, str) else each for each in order
        ),
    )


def module_places(nodes: Iterable[Node]) -> dict[str, str]:
    """Returns the place of each module by its path: that of most of its nodes.

    `trireme.dashboards.events.add_graph` takes it as `devices`.
    """
    places: dict[str, str] = {}
    open_ = [module_tree(nodes)]
    while open_:
        module = open_.pop()
        counts = Counter(node.place for node in module.nodes if node.place)
        if counts:
            places[module.scope] = counts.most_common(1)[0][0]
        open_ += [item for item in module.items if isinstance(item, Module)]
    return places


def segments(nodes: Iterable[Node]) -> list[tuple[tuple[str, str], list[Node]]]:
    """Returns the nodes of each segment, after its depth and place, by these.

    The depth is a text, such as `1`; `1, late` for the late one of two segments of a place.
    """
    found: dict[tuple[int, str, bool], list[Node]] = {}
    for node in nodes:
        if node.depth is not None:
            found.setdefault((node.depth, node.place, node.late), []).append(node)
    ordered = sorted(found.items(), key=lambda each: each[0])
    return [
        ((f"{depth}, late" if late else f"{depth}", place), its)
        for (depth, place, late), its in ordered
    ]

"""The nodes of a picture by the modules of the model, with totals."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from trireme.graph.drawing.picture import Node


@dataclass(frozen=True, slots=True)
class Totals:
    """What some nodes cost together, for one micro-batch."""

    operators: int
    forward_seconds: float
    backward_seconds: float
    resident_bytes: int
    activation_bytes: int
    places: tuple[str, ...]  # in the order of the nodes; without what each task computes

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
    items: tuple[Node | Module, ...]  # in the order of execution

    @property
    def name(self) -> str:
        """The last part of its path."""
        return self.scope.rpartition(".")[2]

    @cached_property
    def modules(self) -> list[Module]:
        """The modules directly in it."""
        return [item for item in self.items if isinstance(item, Module)]

    @cached_property
    def nodes(self) -> tuple[Node, ...]:
        """All nodes in it and in the modules in it."""
        parts = (item.nodes if isinstance(item, Module) else (item,) for item in self.items)
        return tuple(node for part in parts for node in part)

    @cached_property
    def totals(self) -> Totals:
        """What these cost together."""
        return Totals.of(self.nodes)


def module_tree(nodes: Iterable[Node], scope: str = "") -> Module:
    """Returns a module, or the model, of its nodes. A module that is called again is there once."""
    depth = len(scope.split(".")) if scope else 0
    inner: dict[str, list[Node]] = {}
    order: list[Node | str] = []
    for node in nodes:
        if len(node.path) == depth:
            order.append(node)
            continue
        path = ".".join(node.path[: depth + 1])
        if path not in inner:
            order.append(path)
        inner.setdefault(path, []).append(node)
    items = (module_tree(inner[it], it) if isinstance(it, str) else it for it in order)
    return Module(scope, tuple(items))


def placement_rows(module: Module) -> Iterator[tuple[str, Sequence[Node]]]:
    """Yields the rows of the placement table: a label and nodes.

    A module whose nodes are in one place is one row, and so are consecutive nodes of a module.
    What each task computes for itself goes with its neighbours.
    """
    run: list[Node] = []
    for item in module.items:
        if isinstance(item, Node):
            places = Totals.of(run).places
            if places and item.place not in ("", *places):
                yield _label(module.scope, run), run
                run = []
            run.append(item)
            continue
        if run:
            yield _label(module.scope, run), run
            run = []
        if len(item.totals.places) <= 1:
            yield item.scope, item.nodes
        else:
            yield from placement_rows(item)
    if run:
        yield _label(module.scope, run), run


def _label(scope: str, run: Sequence[Node]) -> str:
    first, last = run[0].name, run[-1].name
    names = first if len(run) == 1 else f"{first} to {last}"
    return f"{scope}: {names}" if scope else names


def module_places(nodes: Iterable[Node]) -> dict[str, str]:
    """Returns the place of each module by its path: that of most of its nodes."""
    places: dict[str, str] = {}
    open_ = [module_tree(nodes)]
    while open_:
        module = open_.pop()
        counts = Counter(node.place for node in module.nodes if node.place)
        if counts:
            places[module.scope] = counts.most_common(1)[0][0]
        open_ += module.modules
    return places


def segments(nodes: Iterable[Node]) -> list[tuple[str, str, list[Node]]]:
    """Returns the depth, place and nodes of each segment, by these.

    The depth is a text, such as `1`; `1, late` for the late one of two segments of a place.
    """
    found: dict[tuple[int, str, bool], list[Node]] = {}
    for node in nodes:
        if node.depth is not None:
            found.setdefault((node.depth, node.place, node.late), []).append(node)
    return [
        (f"{depth}, late" if late else f"{depth}", place, found[depth, place, late])
        for depth, place, late in sorted(found)
    ]

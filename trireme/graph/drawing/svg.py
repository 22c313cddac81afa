"""A picture as SVG, laid out by Graphviz: modules as nested boxes, coloured by place.

Source of the layout: Gansner et al., A technique for drawing directed graphs (IEEE Transactions on
Software Engineering, 1993), which the program `dot` implements.
"""

from __future__ import annotations

import html
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from trireme.errors import ConfigurationError
from trireme.graph.drawing.modules import Module, Totals, module_tree
from trireme.graph.drawing.picture import Node, Picture
from trireme.graph.drawing.words import count, duration, size

if TYPE_CHECKING:
    from graphviz import Digraph

# The colours of places, one for each in turn, those of the pages of `trireme report`: on a light
# page, on a dark page, and as light fills on which text can be read.
COLOURS = ("#2563eb", "#d9480f", "#2b8a3e", "#9c36b5", "#0b7285", "#a68a00")
DARK_COLOURS = ("#7aa7ff", "#ff9d66", "#69d083", "#d79be8", "#5ccbdc", "#e3c64b")
TINTS = ("#dbe6fd", "#fbe0d4", "#d9ecdc", "#f0dff5", "#d5e8ec", "#f2ecd0")
_NEITHER = "#eeeeee"  # the fill of what is in no place, or in several

_MOST_OPERATORS = 400  # the largest number that are drawn one by one; of more, modules are drawn
_BOXES = 200  # how many to draw at most, about, where modules are drawn
_FONT = "Helvetica,Arial,sans-serif"
_LINE, _DIM = "#8b9098", "#60646c"


def svg(picture: Picture, *, legend: bool = True) -> str:
    """Returns the drawing as a document of SVG."""
    try:
        import graphviz
    except ImportError as error:
        raise ConfigurationError(
            "a picture as SVG needs the Python package graphviz, which is not installed: pip "
            "install 'trireme-train[graph]', and Graphviz itself, such as by apt-get install "
            "graphviz"
        ) from error
    drawing = _Drawing(picture, legend).graph()
    try:
        text = drawing.pipe(format="svg", encoding="utf-8", quiet=True)
    except graphviz.ExecutableNotFound as error:
        raise ConfigurationError(
            "a picture as SVG needs Graphviz, whose program `dot` is not on the PATH: install it, "
            "such as by apt-get install graphviz or brew install graphviz"
        ) from error
    except graphviz.CalledProcessError as error:
        raise ConfigurationError(
            f"Graphviz could not draw the graph: {error}. Leave out --svg: the text and the page "
            "show the same"
        ) from error
    return str(text)


def element(document: str) -> str:
    """Returns the `<svg>` element of a document of SVG, to stand in a page of HTML."""
    start = document.index("<svg")
    return re.sub(r"<!--.*?-->\n?", "", document[start:], flags=re.DOTALL).strip()


def colour_number(place: str, places: Sequence[str]) -> int | None:
    """Returns the number of a place's colour; None for no place."""
    return places.index(place) % len(COLOURS) if place in places else None


@dataclass(frozen=True, slots=True)
class _Box:
    """What is drawn as one box: a node, or what a module has in one place."""

    scope: str
    place: str
    nodes: tuple[Node, ...]
    is_module: bool = False


class _Drawing:
    def __init__(self, picture: Picture, legend: bool) -> None:
        self._picture = picture
        self._legend = legend
        self._places = picture.places
        self._boxes: list[_Box] = []
        self._number: dict[str, int] = {}  # of the box of each node
        self._nodes = tuple(filter(_is_drawn, picture.nodes))
        by_module = len(picture.operators) > _MOST_OPERATORS
        self._depth = _depth_for(self._nodes) if by_module else None

    def graph(self) -> Digraph:
        from graphviz import Digraph

        graph = Digraph("graph", comment="drawn by trireme graph")
        graph.attr(
            "graph", rankdir="TB", bgcolor="transparent", fontname=_FONT, fontsize="11",
            fontcolor=_DIM, nodesep="0.25", ranksep="0.35", compound="true",
        )  # fmt: skip
        graph.attr(
            "node", shape="box", style="filled,rounded", fontname=_FONT, fontsize="10",
            color=_LINE, fillcolor=_NEITHER, margin="0.12,0.05", height="0.3",
        )  # fmt: skip
        graph.attr(
            "edge", color=_LINE, fontname=_FONT, fontsize="9", fontcolor=_DIM, arrowsize="0.6"
        )
        if self._places and self._legend:
            self._draw_legend(graph)
        self._module(graph, module_tree(self._nodes), 0)
        self._edges(graph)
        return graph

    def _draw_legend(self, graph: Digraph) -> None:
        rows = "".join(
            f'<tr><td bgcolor="{TINTS[number % len(TINTS)]}" '
            f'color="{COLOURS[number % len(COLOURS)]}" border="1" cellpadding="4">'
            f"{html.escape(place, quote=False)}</td></tr>"
            for number, place in enumerate(self._places)
        )
        table = f'<table border="0" cellborder="0" cellspacing="4">{rows}</table>'
        graph.node("places", label=f"<{table}>", shape="plain", style="", tooltip="places")

    def _module(self, graph: Digraph, module: Module, depth: int) -> None:
        for item in module.items:
            if isinstance(item, Node):
                self._add(graph, _Box(module.scope, item.place, (item,)))
        for item in module.modules:
            if depth + 1 == self._depth:
                for place in dict.fromkeys(node.place for node in item.nodes):
                    members = tuple(node for node in item.nodes if node.place == place)
                    self._add(graph, _Box(item.scope, place, members, is_module=True))
                continue
            with graph.subgraph(name=f"cluster_{item.scope}") as inner:
                inner.attr(
                    label=_safe(item.name), tooltip=_safe(item.scope), style="rounded",
                    color=_LINE, margin="8", labeljust="l", **{"class": "box"},
                )  # fmt: skip
                self._module(inner, item, depth + 1)

    def _add(self, graph: Digraph, box: _Box) -> None:
        number = len(self._boxes)
        self._boxes.append(box)
        self._number.update(dict.fromkeys((node.name for node in box.nodes), number))
        label, details = self._words(box)
        colour = colour_number(box.place, self._places)
        more = {"class": "none"}
        if colour is not None:
            more = {"class": f"p{colour}", "fillcolor": TINTS[colour], "color": COLOURS[colour]}
        graph.node(f"n{number}", label=label, tooltip=details, **more)

    @staticmethod
    def _words(box: _Box) -> tuple[str, str]:
        node = box.nodes[0]
        totals = Totals.of(box.nodes)
        operators = count(totals.operators, "operator")
        if box.is_module:
            lines = [box.scope.rpartition(".")[2], operators]
            about = [box.scope, box.place]
        else:
            head = node.operator.removeprefix("aten.") if node.is_operator else node.name
            lines = [head, node.shape]
            about = [node.name, node.operator, node.scope, node.shape, node.source, box.place]
        if totals.operators:
            took = duration(totals.forward_seconds + totals.backward_seconds)
            lines.append(f"{took}, {size(totals.resident_bytes + totals.activation_bytes)}")
        return _lines(lines), _lines(about)

    def _edges(self, graph: Digraph) -> None:
        sizes: dict[tuple[int, int], dict[str, int]] = {}
        for edge in self._picture.edges:
            pair = self._number.get(edge.source, -1), self._number.get(edge.target, -1)
            if min(pair) >= 0 and pair[0] != pair[1]:
                sizes.setdefault(pair, {})[edge.source] = edge.bytes
        for (source, target), values in sizes.items():
            here, there = self._boxes[source].place, self._boxes[target].place
            if here and there and here != there:
                number = colour_number(here, self._places) or 0
                graph.edge(
                    f"n{source}", f"n{target}", label=f" {size(sum(values.values()))} ",
                    penwidth="2.6", color=COLOURS[number], arrowsize="0.8",
                    **{"class": f"crosses e{number}"},
                )  # fmt: skip
            else:
                graph.edge(f"n{source}", f"n{target}")


def _is_drawn(node: Node) -> bool:
    """Returns whether a node is worth a box: sizes, which each task reads from its inputs, not."""
    return "[" in node.shape or not node.is_operator or bool(node.place)


def _depth_for(nodes: Sequence[Node]) -> int:
    """Returns the largest depth of modules with few enough boxes, at least 1."""
    for depth in range(max(len(node.path) for node in nodes), 1, -1):
        boxes = {
            (node.path[:depth], node.place) if len(node.path) >= depth else node.name
            for node in nodes
        }
        if len(boxes) <= _BOXES:
            return depth
    return 1


def _lines(words: Sequence[str]) -> str:
    from graphviz import nohtml

    lines: str = nohtml(r"\n".join(_safe(each) for each in words if each))
    return lines  # of a class that Graphviz's package does not take for markup


def _safe(words: str) -> str:
    from graphviz import escape

    safe: str = escape(words)
    return safe

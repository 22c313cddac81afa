"""A picture as SVG, laid out by Graphviz: modules as nested boxes, coloured by place.

Source of the layout: Gansner et al., A technique for drawing directed graphs (IEEE Transactions on
Software Engineering, 1993), which the program `dot` implements.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator, Sequence

from trireme.errors import ConfigurationError
from trireme.graph.drawing.picture import Module, Node, Picture, Totals
from trireme.graph.drawing.words import count, duration, size

# The colours of places, one for each in turn, those of the pages of `trireme report`; and as light
# fills on which text can be read.
COLOURS = ("#2563eb", "#d9480f", "#2b8a3e", "#9c36b5", "#0b7285", "#a68a00")
TINTS = ("#dbe6fd", "#fbe0d4", "#d9ecdc", "#f0dff5", "#d5e8ec", "#f2ecd0")

_MOST_OPERATORS = 400  # the largest number that are drawn one by one; of more, modules are drawn
_LAYOUT_SECONDS = 120.0
_STYLE = """
graph [rankdir=TB bgcolor=transparent fontname="Helvetica" fontsize=11 fontcolor="#60646c"]
graph [nodesep=0.25 ranksep=0.35 compound=true color="#8b9098" style=rounded labeljust=l]
node [shape=box style="filled,rounded" fontname="Helvetica" fontsize=10 color="#8b9098"]
node [fillcolor="#eeeeee" margin="0.12,0.05" height=0.3]
edge [color="#8b9098" fontname="Helvetica" fontsize=9 fontcolor="#60646c" arrowsize=0.6]
"""


def svg(picture: Picture) -> str:
    """Returns the drawing as a document of SVG."""
    if shutil.which("dot") is None:
        raise ConfigurationError(
            "a picture as SVG needs Graphviz, whose program `dot` is not on the PATH: install it, "
            "such as by apt-get install graphviz or brew install graphviz"
        )
    try:
        drawn = subprocess.run(
            ["dot", "-Tsvg"],
            input=dot(picture),
            capture_output=True,
            text=True,
            check=True,
            timeout=_LAYOUT_SECONDS,
        )
    except (subprocess.CalledProcessError, subprocess.TimeoutExpired) as error:
        raise ConfigurationError(
            f"Graphviz could not draw the graph: {error}. Leave out --svg: the text shows the same"
        ) from error
    return drawn.stdout


def dot(picture: Picture) -> str:
    """Returns the drawing in Graphviz's language."""
    return "\n".join(["digraph graph_ {", _STYLE, *_Drawing(picture).lines(), "}"])


class _Drawing:
    def __init__(self, picture: Picture) -> None:
        self._picture = picture
        self._coarse = len(picture.operators) > _MOST_OPERATORS
        self._boxes: dict[str, tuple[str, str]] = {}  # of each node, with the place

    def lines(self) -> Iterator[str]:
        for number, place in enumerate(self._picture.places):
            yield f"{_quoted(place)} [label={_quoted(place)} {_painted(number)}]"
        # Sizes, which each task reads from its inputs, are worth no box.
        drawn = [
            node
            for node in self._picture.nodes
            if "[" in node.shape or not node.computes or node.place
        ]
        yield from self._module(Module.of(drawn), 0)
        yield from self._edges()

    def _module(self, module: Module, depth: int) -> Iterator[str]:
        for item in module.items:
            if isinstance(item, Node):
                words = [item.operator.removeprefix("aten.") or item.name, item.shape]
                yield self._box(item.name, words, item.place, (item,))
            elif self._coarse and depth == 1:
                for place in dict.fromkeys(node.place for node in item.nodes):
                    nodes = tuple(node for node in item.nodes if node.place == place)
                    operators = count(Totals.of(nodes).operators, "operator")
                    yield self._box(f"{item.scope}@{place}", [item.name, operators], place, nodes)
            else:
                yield f"subgraph {_quoted(f'cluster_{item.scope}')} {{ label={_quoted(item.name)}"
                yield from self._module(item, depth + 1)
                yield "}"

    def _box(self, name: str, words: Sequence[str], place: str, nodes: Sequence[Node]) -> str:
        self._boxes |= dict.fromkeys((node.name for node in nodes), (name, place))
        totals = Totals.of(nodes)
        if totals.operators:
            memory = size(totals.resident_bytes + totals.activation_bytes)
            words = [*words, f"{duration(sum(totals.seconds))}, {memory}"]
        about = [nodes[0].scope, nodes[0].name, nodes[0].source, place]
        painted = _painted(self._picture.places.index(place)) if place else ""
        label, tooltip = _quoted("\n".join(filter(None, words))), _quoted("\n".join(about))
        return f"{_quoted(name)} [label={label} tooltip={tooltip} {painted}]"

    def _edges(self) -> Iterator[str]:
        sizes: dict[tuple[tuple[str, str], tuple[str, str]], dict[str, int]] = {}
        bytes_of = {node.name: node.cost.output_bytes for node in self._picture.nodes}
        for node in self._picture.nodes:
            for source in node.inputs:
                ends = self._boxes.get(source), self._boxes.get(node.name)
                if ends[0] and ends[1] and ends[0] != ends[1]:
                    sizes.setdefault((ends[0], ends[1]), {})[source] = bytes_of[source]
        for ((source, here), (target, there)), values in sizes.items():
            look = ""
            if here and there and here != there:
                colour = COLOURS[self._picture.places.index(here) % len(COLOURS)]
                label = _quoted(f" {size(sum(values.values()))} ")
                look = f'[label={label} penwidth=2.6 color="{colour}" arrowsize=0.8]'
            yield f"{_quoted(source)} -> {_quoted(target)} {look}"


def _painted(number: int) -> str:
    at = number % len(COLOURS)
    return f'fillcolor="{TINTS[at]}" color="{COLOURS[at]}"'


def _quoted(words: str) -> str:
    escaped = words.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'

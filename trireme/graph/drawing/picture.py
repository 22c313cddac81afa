"""What the pictures of a graph show, as plain values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from trireme.graph.capture.optimise import PassCount

INPUT, OUTPUT, PARAMETER, LOSS = "input", "output", "parameter", "loss"
"""The `operator` of nodes that are no operators."""


@dataclass(frozen=True, slots=True)
class Node:
    """An operator, an input or output of the model, or a parameter that is placed by itself."""

    name: str  # unique in the graph
    operator: str  # such as `aten.linear`; or `input`, `output`, `parameter`, `loss`
    scope: str = ""  # the path of its module, with dots; "" for the model itself
    shape: str = ""  # the dtype and shape of its value, such as `float32[s0, 10]`
    source: str = ""  # the line that it comes from, as `file:line`; "" if unknown
    # where it is computed, such as `worker:1` or `worker:0/cuda:1`; "" for what each task computes
    # for itself, and where nothing is placed
    place: str = ""
    forward_seconds: float = 0.0  # the duration of its forward computation, for one micro-batch
    backward_seconds: float = 0.0  # the duration of its backward computation
    resident_bytes: int = 0  # parameters, gradients and optimizer state
    activation_bytes: int = 0  # what is kept from forward to backward
    # the depth of its segment; None where nothing is cut, and for what each task computes
    depth: int | None = None
    late: bool = False  # whether it is in the late one of two segments of this place and depth

    @property
    def is_operator(self) -> bool:
        """Whether it computes something, as an operator or the loss."""
        return self.operator not in (INPUT, OUTPUT, PARAMETER)

    @property
    def path(self) -> tuple[str, ...]:
        """The names of the modules around it, outermost first."""
        return tuple(filter(None, self.scope.split(".")))


@dataclass(frozen=True, slots=True)
class Edge:
    """A value that one node makes and another one reads."""

    source: str  # the name of the node that makes it
    target: str  # the name of the node that reads it
    bytes: int  # its size for one micro-batch
    crosses: bool  # whether it goes from one place to another


@dataclass(frozen=True, slots=True)
class Transfer:
    """A value that goes from one place to another, once however many nodes read it there."""

    value: str  # the name of the node that makes it
    sender: str  # the place of that node
    receiver: str  # the place that receives it
    bytes: int  # its size for one micro-batch
    returns: bool  # whether a gradient of the same size comes back


@dataclass(frozen=True, slots=True)
class PlaceUse:
    """What is predicted for a place in one step."""

    name: str  # the place
    busy_seconds: float  # how long it computes
    peak_bytes: int  # the most that it holds at a time
    limit_bytes: int | None = None  # what it may hold; None for no limit


@dataclass(frozen=True)
class Picture:
    """A model as a graph, from its capture to the predicted step."""

    model: str = ""  # the name of the model's class, or ""
    captured: tuple[Node, ...] = ()  # the operators as captured, in the order of execution
    passes: tuple[PassCount, ...] = ()  # what each optimisation did
    # the optimised graph, in the order of execution; a parameter is before its first reader
    nodes: tuple[Node, ...] = ()
    edges: tuple[Edge, ...] = ()  # between these nodes
    places: tuple[PlaceUse, ...] = ()  # what is predicted for each place
    transfers: tuple[Transfer, ...] = ()  # between places, in the order of the values
    reason: str = ""  # why the placement is as it is; "" where nothing is placed
    # the predicted seconds of a step of each algorithm; None where its placement does not fit
    tried: Mapping[str, float | None] = field(default_factory=dict)
    # the predicted duration of a step; None where nothing is placed
    step_seconds: float | None = None
    micro_batches: int = 1  # into how many parts a step divides its batch
    placed: bool = False  # whether nodes have places
    cut: bool = False  # whether nodes have depths
    costed: bool = False  # whether nodes have costs

    @property
    def operators(self) -> tuple[Node, ...]:
        """The nodes that compute something."""
        return tuple(node for node in self.nodes if node.is_operator)

    @property
    def listed(self) -> tuple[Node, ...]:
        """The nodes of tables: all but inputs and outputs."""
        return tuple(node for node in self.nodes if node.operator not in (INPUT, OUTPUT))

    @property
    def place_names(self) -> tuple[str, ...]:
        """Every place once: those of the prediction, then any others in the order of the nodes."""
        names = [place.name for place in self.places]
        return tuple(dict.fromkeys([*names, *(node.place for node in self.nodes if node.place)]))

    @property
    def removed(self) -> tuple[Node, ...]:
        """The captured operators that the optimisation has removed, folded or merged."""
        kept = {node.name for node in self.nodes}
        return tuple(node for node in self.captured if node.name not in kept)

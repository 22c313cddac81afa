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

    name: str
    operator: str  # such as `aten.linear`; or one of the above
    scope: str = ""  # the path of its module, with dots; "" for the model itself
    shape: str = ""  # the dtype and shape of its value, such as `float32[s0, 10]`
    source: str = ""  # the line that it comes from, as `file:line`; "" if unknown
    place: str = ""  # such as `worker:1/cpu`; "" for what each task computes for itself
    forward_seconds: float = 0.0  # for one micro-batch
    backward_seconds: float = 0.0
    resident_bytes: int = 0  # parameters, gradients and optimizer state
    activation_bytes: int = 0  # what is kept from forward to backward
    depth: int | None = None  # that of its segment, where the graph is cut
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
    """A value that one node makes and another one reads, by their names."""

    source: str
    target: str
    bytes: int  # its size for one micro-batch


@dataclass(frozen=True, slots=True)
class Transfer:
    """A value that goes from one place to another, once however many nodes read it there."""

    value: str  # the name of the node that makes it
    sender: str
    receiver: str
    bytes: int  # its size for one micro-batch
    returns: bool  # whether a gradient of the same size comes back


@dataclass(frozen=True, slots=True)
class DeviceUse:
    """What is predicted for a device in one step."""

    name: str
    busy_seconds: float
    peak_bytes: int
    limit_bytes: int | None = None


@dataclass(frozen=True)
class Picture:
    """A model as a graph, from its capture to the predicted step."""

    nodes: tuple[Node, ...]  # in the order of execution; a parameter is before its first reader
    edges: tuple[Edge, ...] = ()
    model: str = ""  # the name of the model's class
    captured: tuple[Node, ...] = ()  # the operators before the optimisation
    passes: tuple[PassCount, ...] = ()
    uses: tuple[DeviceUse, ...] = ()
    transfers: tuple[Transfer, ...] = ()
    reason: str = ""  # why the placement is as it is
    tried: Mapping[str, float | None] = field(default_factory=dict)  # as of `Placement`
    step_seconds: float = 0.0
    micro_batches: int = 1

    @property
    def operators(self) -> tuple[Node, ...]:
        """The nodes that compute something."""
        return tuple(node for node in self.nodes if node.is_operator)

    @property
    def listed(self) -> tuple[Node, ...]:
        """The nodes of tables: all but inputs and outputs."""
        return tuple(node for node in self.nodes if node.operator not in (INPUT, OUTPUT))

    @property
    def places(self) -> tuple[str, ...]:
        """Every place once: those of the prediction, then any others in the order of the nodes."""
        names = [use.name for use in self.uses]
        return tuple(dict.fromkeys([*names, *(node.place for node in self.nodes if node.place)]))

    @property
    def removed(self) -> tuple[Node, ...]:
        """The captured operators that the optimisation has removed, folded or merged."""
        kept = {node.name for node in self.nodes}
        return tuple(node for node in self.captured if node.name not in kept)

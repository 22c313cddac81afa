"""A model's graph from one traced pass: operations, tensors, and their costs."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Graph", "Node", "Output"]


@dataclass(frozen=True)
class Output:
    """A tensor that a node makes.

    Attributes:
        shape: the tensor's shape.
        dtype: the tensor's dtype, as text.
        bytes: the memory allocated for it; 0 where it shares memory with an input.
    """

    shape: tuple[int, ...]
    dtype: str
    bytes: int


@dataclass(frozen=True)
class Node:
    """An operation, a parameter, an input or an output.

    Attributes:
        name: unique, with scopes separated by `/`.
        kind: the operation, or `Parameter`, `Input` and the like.
        device: the device, in TensorFlow's spelling.
        sources: the names of the nodes whose outputs it uses.
        outputs: the tensors that it makes.
        began: when it began, in nanoseconds of any clock; 0 if nothing is computed.
        nanoseconds: its duration.
    """

    name: str
    kind: str
    device: str
    sources: tuple[str, ...] = ()
    outputs: tuple[Output, ...] = ()
    began: int = 0
    nanoseconds: int = 0


@dataclass(frozen=True)
class Graph:
    """The nodes of one pass, in the order of execution."""

    nodes: tuple[Node, ...]

"""A model's graph as one pass through it showed it: operations, tensors, and what they cost."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Graph", "Node", "Output"]


@dataclass(frozen=True)
class Output:
    """A tensor that a node makes.

    Attributes:
        shape: its.
        dtype: its, in words.
        bytes: of memory taken for it; 0 where it lies in memory that an input had.
    """

    shape: tuple[int, ...]
    dtype: str
    bytes: int


@dataclass(frozen=True)
class Node:
    """An operation, a parameter, an input or an output.

    Attributes:
        name: unique, with scopes separated by `/`.
        kind: what it does.
        device: where, in TensorFlow's spelling.
        sources: the names of the nodes whose outputs it takes.
        outputs: what it makes.
        began: when, in nanoseconds of any clock; 0 for what is not computed.
        nanoseconds: how long it took.
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
    """What one pass did, in the order in which it was done."""

    nodes: tuple[Node, ...]

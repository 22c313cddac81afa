"""The costs of a graph as arrays, for the simulation."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from trireme.graph.place.costs import CostGraph

Bools = NDArray[np.bool_]
Floats = NDArray[np.float64]
Ints = NDArray[np.intp]


@dataclass(frozen=True, eq=False)
class Costs:
    """A cost graph as arrays: nodes in topological order, the values that they make, who reads.

    A node is an operation or several fused ones. Then it may make several values; those that
    nobody outside reads are left out.
    """

    # seconds, for each node; `backward` likewise, and `update`, once at the end; `accumulation`, in
    # each backward computation but the first
    forward: Floats
    backward: Floats
    update: Floats
    accumulation: Floats
    resident: Floats  # bytes, for each node; `activation` and `working` likewise
    activation: Floats
    working: Floats
    makers: Ints  # the node that makes each value, ascending
    sizes: Floats  # the bytes of each value
    differentiable: Bools  # whether gradients of each value return
    stored: Bools  # whether each value is there before the step, and is sent once
    values: Ints  # the value of each reading, ascending, and of one value by the reader
    readers: Ints  # the node that reads, another than the maker and after it
    segment_seconds: float = 0.0  # what a segment takes besides its nodes, in each direction

    @staticmethod
    def of(graph: CostGraph) -> Costs:
        """Returns the arrays of a graph: node and value of an operation have its place."""
        operations, places = graph.operations, graph.positions
        sizes = np.array([each.output_bytes for each in operations], dtype=float)
        inputs = [sorted({places[name] for name in each.inputs}) for each in operations]
        readings = sorted((value, reader) for reader, read in enumerate(inputs) for value in read)
        values, readers = np.array(readings, dtype=np.intp).reshape(-1, 2).T
        stored = np.array([each.stored for each in operations], dtype=bool)
        backward = np.array([each.backward_seconds for each in operations], dtype=float)
        return Costs(
            forward=np.array([each.forward_seconds for each in operations], dtype=float),
            backward=np.where(stored, 0.0, backward),
            update=np.where(stored, backward, 0.0),
            accumulation=np.array([each.accumulation_seconds for each in operations], dtype=float),
            resident=np.array([each.resident_bytes for each in operations], dtype=float),
            activation=np.array([each.activation_bytes for each in operations], dtype=float),
            working=sizes + np.array([sizes[read].sum() for read in inputs], dtype=float),
            makers=np.arange(len(operations), dtype=np.intp),
            sizes=sizes,
            differentiable=np.array([each.differentiable for each in operations], dtype=bool),
            stored=stored,
            values=values.copy(),
            readers=readers.copy(),
            segment_seconds=graph.segment_seconds,
        )

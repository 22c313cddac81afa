"""The strategy `graph`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from trireme.mesh import Mesh
from trireme.parallel.strategies import Collective


@dataclass(frozen=True)
class Graph(Collective):
    """One replica as a dataflow graph, whose operations are placed on the processes.

    Values cross between processes by send and receive. Source: Abadi et al., TensorFlow (OSDI
    2016), section 3.3.
    """

    name: ClassVar[str] = "graph"
    axis: ClassVar[str] = "graph"

    def backend(self, mesh: Mesh) -> str:
        """Returns that of a graph, which one process captures too."""
        return "graph"

"""`--strategy halved`: as `allreduce`, with gradients that travel as float16."""

from dataclasses import dataclass
from typing import ClassVar

from trireme.mesh import Mesh
from trireme.parallel.strategies import Collective
from trireme.strategies import BackendType

BACKEND = BackendType("trireme_halved_backend:HalvedTogether")


@dataclass(frozen=True)
class Halved(Collective):
    """Replicas of the whole model, whose gradients are averaged in float16."""

    name: ClassVar[str] = "halved"
    axis: ClassVar[str] = "dp"

    def backend(self, mesh: Mesh) -> str:
        return "halved" if mesh.size > 1 else ""

"""How long a worker's steps take, by what it does: its phases."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from trireme.metrics import Registry

__all__ = ["ALONE", "SERVED", "Phases", "Span"]

SERVED = ("data", "compute", "push", "wait")
"""With parameter servers, or other processes: waits for its batch; forward and backward; sends;
waits for the answer, which brings the values."""

ALONE = ("data", "compute", "apply")
"""A lone process applies its updates itself."""

Span = Callable[[str, float, float], object]
"""Takes a phase, and when it began and ended, on `time.monotonic`."""


class Phases:
    """Sums and histograms of the phases of one worker's steps.

    Args:
        names: the phases.
        registry: where the histograms are.

    Attributes:
        totals: the seconds spent so far, by phase.
        spectator: told of each phase of each step besides, while somebody looks.
    """

    def __init__(self, names: Sequence[str], registry: Registry) -> None:
        self.totals = dict.fromkeys(names, 0.0)
        self.spectator: Span | None = None
        self._observe = {
            name: registry.histogram(
                "trireme_phase_seconds", "Seconds by phase of a step", phase=name
            ).observe
            for name in names
        }

    def add(self, phase: str, began: float, ended: float) -> None:
        """Counts a phase of a step between two readings of `time.monotonic`."""
        self.totals[phase] += ended - began
        self._observe[phase](ended - began)
        if self.spectator is not None:
            self.spectator(phase, began, ended)

    def since(self, before: Mapping[str, float], steps: int) -> dict[str, float]:
        """Returns the mean seconds per step, by phase, since `totals` was `before`."""
        return {
            f"{name}_seconds": (total - before[name]) / max(steps, 1)
            for name, total in self.totals.items()
        }

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

    What is added is counted when somebody asks, or `settle`s: where steps take a millisecond, to
    count each of them as it comes costs more than many at once.

    Args:
        names: the phases.
        registry: where the histograms are.

    Attributes:
        add: takes a phase of a step, as a tuple with two readings of `time.monotonic`.
        spectator: told of each phase of each step besides, while somebody looks.
    """

    def __init__(self, names: Sequence[str], registry: Registry) -> None:
        self._totals = dict.fromkeys(names, 0.0)
        self._waiting: list[tuple[str, float, float]] = []
        self._spectator: Span | None = None
        self._histograms = {
            name: registry.histogram(
                "trireme_phase_seconds", "Seconds by phase of a step", phase=name
            )
            for name in names
        }
        self.add = self._waiting.append

    @property
    def totals(self) -> dict[str, float]:
        """The seconds spent so far, by phase.

        Raises:
            KeyError: a phase was added that there is not.
        """
        self.settle()
        return self._totals

    @property
    def spectator(self) -> Span | None:
        """Who is told of each phase: of those that are added from now on."""
        return self._spectator

    @spectator.setter
    def spectator(self, spectator: Span | None) -> None:
        self.settle()
        self._spectator = spectator

    def settle(self) -> None:
        """Counts what was added."""
        waiting = self._waiting[:]
        durations: dict[str, list[float]] = {name: [] for name in self._totals}
        for phase, began, ended in waiting:
            durations[phase].append(ended - began)
            if self._spectator is not None:
                self._spectator(phase, began, ended)
        del self._waiting[: len(waiting)]
        for phase, seconds in durations.items():
            self._totals[phase] += sum(seconds)
            self._histograms[phase].observe_all(seconds)

    def since(self, before: Mapping[str, float], steps: int) -> dict[str, float]:
        """Returns the mean seconds per step, by phase, since `totals` was `before`."""
        return {
            f"{name}_seconds": (total - before[name]) / max(steps, 1)
            for name, total in self.totals.items()
        }

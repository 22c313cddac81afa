"""The measuring side of `programs/lane.py`: lets a contender run for a while, and counts steps."""

from __future__ import annotations

import fcntl
import mmap
import os
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from benchmarks.programs import lane


@dataclass(frozen=True)
class LaneState:
    """What a participant has left behind.

    Attributes:
        name: the participant's.
        steps: how many it has made.
        ready: whether it waits at the gate.
        loss: its last.
        global_step: as it knew it with that loss.
    """

    name: str
    steps: int
    ready: bool
    loss: float
    global_step: int


class Gate:
    """A gate in a directory of its own, closed at first.

    Args:
        directory: empty; participants are told of it.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        path = directory / "gate"
        path.write_bytes(bytes([lane.CLOSED]))
        self._file = os.open(path, os.O_RDWR)
        self._byte = mmap.mmap(self._file, 1)
        fcntl.flock(self._file, fcntl.LOCK_EX)

    def open(self) -> None:
        """Lets the participants run."""
        self._byte[0] = lane.OPEN
        fcntl.flock(self._file, fcntl.LOCK_UN)

    def close(self) -> None:
        """Has each participant wait after the step that it is at."""
        # The lock first: who finds the gate closed waits for it.
        fcntl.flock(self._file, fcntl.LOCK_EX)
        self._byte[0] = lane.CLOSED

    def lanes(self) -> list[LaneState]:
        """Returns how each participant is that has come so far."""
        states = []
        for path in sorted(self.directory.glob("*.lane")):
            with path.open("rb") as file:
                steps, state, loss, step = lane.HEADER.unpack(file.read(lane.HEADER.size))
            states.append(LaneState(path.stem, steps, state == lane.READY, loss, step))
        return states

    def wait_until_ready(self, participants: int, deadline: float) -> None:
        """Waits until so many participants are at the gate.

        Raises:
            TimeoutError: not so many came.
        """
        while sum(state.ready for state in self.lanes()) < participants:
            if time.monotonic() > deadline:
                came = [state.name for state in self.lanes()]
                raise TimeoutError(f"of {participants} participants only {came} are ready")
            time.sleep(0.02)

    def settle(self, seconds: float = 0.5) -> None:
        """Waits until a closed gate has stopped everybody, whether at it or in a collective."""
        deadline = time.monotonic() + seconds
        before = -1
        while time.monotonic() < deadline:
            states = self.lanes()
            steps = sum(state.steps for state in states)
            if all(state.ready for state in states) or (steps == before):
                return
            before = steps
            time.sleep(0.05)

    def stamps(self, begin: float, end: float) -> dict[str, npt.NDArray[np.float64]]:
        """Returns the times in [begin, end) at which each participant had made a step."""
        found = {}
        for path in sorted(self.directory.glob("*.lane")):
            with path.open("rb") as file:
                steps = lane.HEADER.unpack(file.read(lane.HEADER.size))[0]
            count = min(steps, lane.CAPACITY)
            times = np.fromfile(path, np.float64, count, offset=lane.HEADER.size)
            found[path.stem] = np.sort(times[(times >= begin) & (times < end)])
        return found


def rate(stamps: npt.NDArray[np.float64]) -> float:
    """Returns the steps per second of one participant: between its first and its last stamp."""
    if len(stamps) < 2:
        return 0.0
    return float((len(stamps) - 1) / (stamps[-1] - stamps[0]))

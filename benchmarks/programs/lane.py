"""A participant's side of a measurement: it steps while the gate is open, and stamps each step.

One mapped file a participant holds the stamps; the gate is a byte in another one, and a lock that
the measuring side holds while nobody may run. So a step costs a fraction of a microsecond to
record, a participant that waits costs nothing at all, and one that hangs in a collective while
the others wait is no trouble. Standard library only: the peers' environments import it too.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import struct
import time
from pathlib import Path

CLOSED, OPEN = 0, 1
"""What the gate's byte says."""

READY = 1
"""The state of a participant that waits at the gate."""

HEADER = struct.Struct("=QQdQ")
"""How many steps were stamped, the participant's state, its last loss, its global step."""

CAPACITY = 1 << 20
"""How many stamps are kept, the latest ones; each is eight bytes, and the file is sparse."""

_WORDS = HEADER.size // 8


class Lane:
    """One participant.

    Args:
        directory: where the measuring side put the file `gate`.
        name: of this participant, unique in the directory.
    """

    def __init__(self, directory: str, name: str) -> None:
        self._gate_file = os.open(Path(directory) / "gate", os.O_RDWR)
        self._gate = mmap.mmap(self._gate_file, 1)
        # Under another name until it is complete: whoever sees it can read it.
        path = Path(directory) / f"{name}.lane"
        hidden = path.with_suffix(".new")
        with hidden.open("w+b") as file:
            file.truncate(HEADER.size + 8 * CAPACITY)
            mapped = memoryview(mmap.mmap(file.fileno(), 0))
        hidden.rename(path)
        self._counts = mapped[: HEADER.size].cast("Q")
        self._loss = mapped[: HEADER.size].cast("d")
        self._stamps = mapped[HEADER.size :].cast("d")
        self._steps = 0

    def wait(self) -> None:
        """Waits at the gate; to be called once all is set up, before the first step."""
        self._counts[1] = READY
        while self._gate[0] == CLOSED:
            # Blocks, using no processor, until the measuring side gives the lock up.
            fcntl.flock(self._gate_file, fcntl.LOCK_SH)
            abandoned = self._gate[0] == CLOSED
            fcntl.flock(self._gate_file, fcntl.LOCK_UN)
            if abandoned:  # it opens before it gives the lock up: it must have died
                raise SystemExit("nobody measures any longer")
        self._counts[1] = 0

    def step(self) -> None:
        """A step is done; waits while the gate is closed."""
        steps = self._steps
        self._stamps[steps % CAPACITY] = time.perf_counter()
        self._steps = steps + 1
        self._counts[0] = steps + 1
        if self._gate[0] == CLOSED:
            self.wait()

    def tell(self, *, loss: float, global_step: int = 0) -> None:
        """Leaves how training goes, so that a contender that trains nothing is found out."""
        self._loss[2] = loss
        self._counts[3] = global_step

"""The trace of one server: what it did when, recorded while a task traces the job.

Notes are kept after the trace has ended: workers trace the same steps, and one may have made them
before another begins. The reader leaves out notes of another time.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence

import msgspec

from trireme.ps.messages import Trace, Traced

_MOST = 200_000
"""The most notes that are kept; the oldest are dropped."""


class Note(msgspec.Struct, frozen=True, array_like=True):
    """One thing that a server did."""

    name: str  # the type of the message that was handled, or `apply`
    # the times, in seconds on the server's monotonic clock
    began: float
    ended: float
    peer: str = ""  # the task that sent the message; "" for `apply`
    step: int = 0  # the global step that was made; 0 for a message


class Notes:
    """The notes of one server, and the tasks that trace it."""

    def __init__(self) -> None:
        # the tasks that trace the server; looked at at every message
        self.wanted_by: set[str] = set()
        self._notes: deque[Note] = deque(maxlen=_MOST)

    def add(self, note: Note) -> None:
        """Keeps a note."""
        self._notes.append(note)

    def answer(self, task: str, request: Trace) -> tuple[Traced, Sequence[memoryview]]:
        """Begins or ends a task's trace, or returns the notes; returns the answer."""
        views: list[memoryview] = []
        if request.action == "start":
            self.wanted_by.add(task)
        elif request.action == "stop":
            self.wanted_by.discard(task)
        else:
            views = [memoryview(self.export())]
        return Traced(time.time() - time.monotonic()), views

    def export(self) -> bytes:
        """Returns the notes as JSON: a list of `Note`."""
        return msgspec.json.encode(list(self._notes))

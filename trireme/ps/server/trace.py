"""The trace of one server: what it did when, recorded while a task traces the job.

Notes are kept after the trace has ended: workers trace the same steps, and one may have made them
before another begins. The reader leaves out notes of another time.
"""

from __future__ import annotations

from collections import deque

import msgspec

__all__ = ["Note", "Notes"]

_MOST = 200_000
"""The most notes that are kept; the oldest are dropped."""


class Note(msgspec.Struct, frozen=True, array_like=True):
    """One thing that a server did.

    Attributes:
        name: the type of the message that was handled, or `apply`.
        began, ended: the times, in seconds on the server's monotonic clock.
        peer: the task that sent the message; "" for `apply`.
        step: the global step that was made; 0 for a message.
    """

    name: str
    began: float
    ended: float
    peer: str = ""
    step: int = 0


class Notes:
    """The notes of one server, and the tasks that trace it.

    Attributes:
        wanted: whether any task traces the server; read at every message.
    """

    def __init__(self) -> None:
        self.wanted = False
        self._wanted_by: set[str] = set()
        self._notes: deque[Note] = deque(maxlen=_MOST)

    def start(self, task: str) -> None:
        """Begins a task's trace."""
        self._wanted_by.add(task)
        self.wanted = True

    def stop(self, task: str) -> None:
        """Ends a task's trace, if there is one."""
        self._wanted_by.discard(task)
        self.wanted = bool(self._wanted_by)

    def handled(self, name: str, peer: str, began: float, ended: float) -> None:
        """Notes that a message was handled."""
        self._notes.append(Note(name, began, ended, peer))

    def applied(self, step: int, began: float, ended: float) -> None:
        """Notes that a step was made."""
        self._notes.append(Note("apply", began, ended, step=step))

    def export(self) -> bytes:
        """Returns the notes as JSON: a list of `Note`."""
        return msgspec.json.encode(list(self._notes))

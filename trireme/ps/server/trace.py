"""What a server did when: noted while somebody traces the job, and at no other time.

Notes stay when nobody wants more: workers trace the same steps of theirs, and one may be through
with them before another begins. Whoever reads them leaves out what is of another time.
"""

from __future__ import annotations

from collections import deque

import msgspec

__all__ = ["Note", "Notes"]

_MOST = 200_000
"""So many notes are kept; older ones go."""


class Note(msgspec.Struct, frozen=True, array_like=True):
    """One thing that a server did.

    Attributes:
        name: what: the kind of a message that was handled, or `apply`.
        began, ended: when, in seconds on the server's monotonic clock.
        peer: whose message it was; "" for `apply`.
        step: the global step that was made; 0 for a message.
    """

    name: str
    began: float
    ended: float
    peer: str = ""
    step: int = 0


class Notes:
    """The notes of one server, and who wants them.

    Attributes:
        wanted: whether anybody wants notes: asked at every message.
    """

    def __init__(self) -> None:
        self.wanted = False
        self._wanted_by: set[str] = set()
        self._notes: deque[Note] = deque(maxlen=_MOST)

    def start(self, task: str) -> None:
        """A task wants notes from now on."""
        self._wanted_by.add(task)
        self.wanted = True

    def stop(self, task: str) -> None:
        """A task wants no more notes, or is gone."""
        self._wanted_by.discard(task)
        self.wanted = bool(self._wanted_by)

    def handled(self, name: str, peer: str, began: float, ended: float) -> None:
        """A message was handled."""
        self._notes.append(Note(name, began, ended, peer))

    def applied(self, step: int, began: float, ended: float) -> None:
        """A step was made."""
        self._notes.append(Note("apply", began, ended, step=step))

    def export(self) -> bytes:
        """Returns the notes as JSON: a list of `Note`."""
        return msgspec.json.encode(list(self._notes))

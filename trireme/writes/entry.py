"""What finds the writes of programs, and hands them to workers that come, as entry points."""

from __future__ import annotations

from trireme.session.model.own_writes import WritesType
from trireme.session.worker.observer import ObserverType

WATCHED = WritesType("trireme.writes.watched_writes:watched_writes")
CONSTANTS = ObserverType("trireme.writes.constants:Constants")

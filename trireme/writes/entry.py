"""What finds the writes of programs, as its entry point declares it."""

from __future__ import annotations

from trireme.session.model.own_writes import WritesType

WATCHED = WritesType("trireme.writes.watched_writes:watched_writes")

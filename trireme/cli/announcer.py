"""Tells a job's coordinator at once which of its tasks' processes have ended."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Self

from msgspec.structs import replace

from trireme.cli.live import observer
from trireme.errors import TriremeError, WireError
from trireme.launch.launcher import LostProcess
from trireme.launch.run_directory import read_record

if TYPE_CHECKING:
    from trireme.cluster.observer import Observer

RETRY_SECONDS = 0.1
TRY_SECONDS = 2.0
"""How long a coordinator that does not answer is told again. One that is started again later hears
of everything once more, and notices what it has not heard by itself."""


@dataclass(frozen=True, slots=True)
class _News:
    address: str
    lost: tuple[LostProcess, ...]
    until: float


class Announcer:
    """Tells the coordinator of lost processes, on a thread of its own. A context manager.

    Without it the coordinator waits until a task's connection has been gone, or silent, for a
    while: it cannot know that a process has ended.

    Args:
        run: the job's run directory, which holds what an observer needs.
    """

    def __init__(self, run: Path) -> None:
        self._run = run
        self._news: queue.SimpleQueue[_News | None] = queue.SimpleQueue()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._tell_all, name="announcer", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._ended.set()
        self._news.put(None)
        self._thread.join(timeout=TRY_SECONDS)

    def announce(self, address: str, lost: Sequence[LostProcess]) -> None:
        """Tells the coordinator at an address that processes have ended. Does not wait."""
        self._news.put(_News(address, tuple(lost), time.monotonic() + TRY_SECONDS))

    def _tell_all(self) -> None:
        import trireme.cluster.observer  # noqa: F401 - takes a while, so not when it matters

        while (news := self._news.get()) is not None:
            with suppress(TriremeError):  # the run directory or the coordinator is gone
                record = replace(read_record(self._run), coordinator=news.address)
                self._tell(observer(record, timeout=TRY_SECONDS), news)

    def _tell(self, coordinator: Observer, news: _News) -> None:
        from trireme.cluster.messages import TaskEnded

        for each in news.lost:
            ended = TaskEnded(each.role, each.index, each.host, each.pid, each.reason)
            while True:
                try:
                    coordinator.report_ended(ended)
                    break
                except WireError:
                    if time.monotonic() >= news.until or self._ended.wait(RETRY_SECONDS):
                        return

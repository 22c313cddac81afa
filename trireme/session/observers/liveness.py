"""The liveness of a worker's main thread in its heartbeats: its steps, or why it makes none."""

from __future__ import annotations

import sys
import sysconfig
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from trireme.cluster.progress import EXCUSE, FIRST_BATCH, LOCATION, STEPS

_LIBRARIES = (
    str(Path(threading.__file__).parent),
    str(Path(__file__).parent.parent.parent),  # this package
    sysconfig.get_path("purelib"),
    "<frozen",
)

WAITS = "it waits for the answer to its push"
"""The excuse of a worker while servers, or other processes of its group, have not answered."""


class Liveness:
    """Counts the steps of a thread; another thread reads its `status`."""

    def __init__(self) -> None:
        self.steps = 0
        # Why no step can be expected now; "" while steps can be. The first one may take long.
        self.excuse = "no step was made yet"
        self._thread = threading.get_ident()
        self._reported = -1

    def watch(self) -> None:
        self._thread = threading.get_ident()

    def stepped(self) -> None:
        self.steps += 1
        self.excuse = ""

    @contextmanager
    def excused(self, why: str) -> Iterator[None]:
        before, self.excuse = self.excuse, why
        try:
            yield
        finally:
            self.excuse = before

    @contextmanager
    def loading(self) -> Iterator[None]:
        """Says during the block that a batch is made. Only the first one may take its time."""
        with self.excused(self.excuse if self.steps else FIRST_BATCH):
            yield

    def doing(self) -> tuple[str, str]:
        """Returns an excuse, other than to wait for others, and the line that the thread runs."""
        status = self.status()
        excuse = str(status.get(EXCUSE, ""))
        return "" if excuse == WAITS else excuse, str(status.get(LOCATION, ""))

    def status(self) -> Mapping[str, int | str]:
        """Returns the fields that the next heartbeat adds to the reported status."""
        steps, excuse, status = self.steps, self.excuse, dict[str, int | str]()
        if excuse in ("", FIRST_BATCH) and steps == self._reported:  # look closer
            frame = sys._current_frames().get(self._thread)
            if frame is not None:
                own = _own_frame(frame)
                status[LOCATION] = f"{_line(own)} in {own.f_code.co_name}"
        self._reported = steps
        if excuse:
            status[EXCUSE] = excuse
        return {STEPS: steps, **status}


def line_of_program() -> str:
    """Returns the line of the program that runs now, such as `train.py:41`; else of a library."""
    return _line(_own_frame(sys._getframe(1)))


def _line(frame: FrameType) -> str:
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"


def _own_frame(frame: FrameType) -> FrameType:
    """Returns the innermost frame of the program, outside Python's directories and this package."""
    own: FrameType | None = frame
    while own is not None and own.f_code.co_filename.startswith(_LIBRARIES):
        own = own.f_back
    return own or frame

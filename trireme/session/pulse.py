"""What a worker's heartbeats say of its main thread: how many steps it has made, or why none."""

from __future__ import annotations

import sys
import sysconfig
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from trireme.cluster.progress import EXCUSE, PLACE, STEPS

__all__ = ["Pulse"]

_LIBRARIES = (
    str(Path(threading.__file__).parent),
    str(Path(__file__).parent.parent),
    sysconfig.get_path("purelib"),
    "<frozen",
)
_DEBUGGERS = ("pdb", "bdb", "ipdb", "pudb", "pydevd", "_pydevd_bundle", "debugpy", "IPython")
_COMPILERS = ("torch._dynamo", "torch._inductor", "torch._functorch", "torch._export", "triton")


class Pulse:
    """Counts the steps of a thread. Another thread asks for its `status`.

    Attributes:
        steps: how many were made.
        excuse: why none can be expected now; "" while they can.
    """

    def __init__(self) -> None:
        self.steps = 0
        self.excuse = "no step was made yet"  # the first takes as long as it takes
        self._thread = threading.get_ident()
        self._told = -1

    def watch(self) -> None:
        """It is the calling thread that makes the steps."""
        self._thread = threading.get_ident()

    def stepped(self) -> None:
        """A step was made: from now on the next one is expected."""
        self.steps += 1
        self.excuse = ""

    @contextmanager
    def excused(self, why: str) -> Iterator[None]:
        """Nobody shall expect a step while the block runs."""
        before, self.excuse = self.excuse, why
        try:
            yield
        finally:
            self.excuse = before

    def status(self) -> Mapping[str, int | str]:
        """Returns what the next heartbeat says, besides what was reported."""
        steps, excuse, status = self.steps, self.excuse, dict[str, int | str]()
        if not excuse and steps == self._told:  # look closer
            frame = sys._current_frames().get(self._thread)
            excuse = _excuse_of(frame)
            if frame is not None:
                status[PLACE] = _place_of(frame)
        self._told = steps
        if excuse:
            status[EXCUSE] = excuse
        return {STEPS: steps, **status}


def _place_of(frame: FrameType) -> str:
    """Returns where a thread is in the program: in what that has called only if there is no such.

    Libraries are what lies where Python or this package lies.
    """
    own: FrameType | None = frame
    while own is not None and own.f_code.co_filename.startswith(_LIBRARIES):
        own = own.f_back
    shown = own or frame
    name = Path(shown.f_code.co_filename).name
    return f"{name}:{shown.f_lineno} in {shown.f_code.co_name}"


def _excuse_of(frame: FrameType | None) -> str:
    """Returns why a thread may take its time, by what it is doing; "" if there is no reason."""
    debugger = sys.modules.get("debugpy")
    if debugger is not None and debugger.is_client_connected():
        return "a debugger is attached"
    while frame is not None:
        module = str(frame.f_globals.get("__name__", ""))
        if module.split(".")[0] in _DEBUGGERS:
            return "a debugger holds it"
        if module.startswith(_COMPILERS):
            return "it compiles"
        frame = frame.f_back
    return ""

"""A hook by which a worker is killed, stopped, or raises, at a step of its own."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trireme.session.hooks import Hook
from trireme.session.session import Session


class Injected(Exception):
    """What a worker raises when it is told to."""


@dataclass(frozen=True)
class Fault:
    """What happens to which worker, and when.

    Attributes:
        worker: its index.
        step: its own step, from 1, in the process that it is at that time.
        moment: `before` the step; or `in flight`: its push is sent and not answered.
        action: `kill` (SIGKILL), `hang` (SIGSTOP), `raise`, `stop job` (SIGTERM to the launcher,
            as a user's `kill` sends it), or `hear of stop` (it waits for another one's `stop job`).
    """

    worker: int
    step: int
    moment: str
    action: str

    @classmethod
    def parse(cls, text: str) -> Fault:
        """Reads `worker:step:moment:action`."""
        worker, step, moment, action = text.split(":")
        return cls(int(worker), int(step), moment, action)

    def happen(self) -> None:
        """Lets it happen to this process.

        Raises:
            Injected: if that is the fault.
        """
        if self.action == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif self.action == "hang":
            os.kill(os.getpid(), signal.SIGSTOP)
        elif self.action == "stop job":
            os.kill(os.getppid(), signal.SIGTERM)
        elif self.action == "hear of stop":
            pass  # see `Faults`
        else:
            raise Injected(f"worker:{self.worker} at its step {self.step}")


def _until_told(session: Session) -> None:
    """Waits until a worker has heard that its job is to stop: its steps take no time at all."""
    deadline = time.monotonic() + 60.0
    while session.worker.lifecycle.interrupted is None:
        assert time.monotonic() < deadline, "nobody told this worker to stop"
        threading.Event().wait(0.005)


class Faults(Hook):
    """Lets faults happen to the worker whose session it hooks.

    Args:
        faults: what is to happen.
        notes: a directory where it is noted what has: to a worker that is started again, the same
            thing does not happen twice.
    """

    def __init__(self, faults: Iterable[Fault], notes: Path) -> None:
        self._faults = list(faults)
        self._notes = notes
        self._step = 0

    def before_step(self, session: Session, batch: Any) -> None:
        self._step += 1
        for fault in self._faults:
            if (fault.worker, fault.step) == (session.task.index, self._step):
                self._due(fault, session)

    def _due(self, fault: Fault, session: Session) -> None:
        note = self._notes / f"fault-{fault.worker}-{fault.step}"
        try:
            note.touch(exist_ok=False)
        except FileExistsError:
            return
        if fault.moment == "before":
            fault.happen()
            if fault.action in ("stop job", "hear of stop"):
                _until_told(session)
            return
        backend: Any = session.worker.backend
        wait = backend.wait

        def wait_in_vain() -> Any:
            backend.wait = wait
            fault.happen()
            return wait()

        backend.wait = wait_in_vain

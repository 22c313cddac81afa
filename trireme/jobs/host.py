"""The launcher of a job that a program has started: a process of its own.

    python -m trireme.jobs.host FD

It does what `trireme run` does. Its standard input gives it the `Order`, then a byte for each
request to stop the job. At the end of that input the program is gone, and the job is stopped. FD is
the pipe for its reports.
"""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

import msgspec

from trireme.cli.run import start
from trireme.cli.runs import query
from trireme.cluster.messages import StatusValue
from trireme.errors import TriremeError, UsageError
from trireme.jobs.messages import Begun, Ended, Line, Order, Progress, Report
from trireme.launch.exit_reason import INTERRUPTED
from trireme.launch.output import Console
from trireme.launch.run_directory import read_record
from trireme.records.numbers import number_of
from trireme.records.records import read_starts

WATCH_SECONDS = 0.5
CLOSE_SECONDS = 10.0


class Reports(Console):
    """A console whose lines go to the program that has started the job. Any thread may write.

    A thread of its own writes, so that a program that reads nothing for a while delays no task.
    """

    def __init__(self, fd: int) -> None:
        super().__init__(sys.stdout, sys.stderr, {})
        os.set_inheritable(fd, False)
        self.run_dir: Path | None = None
        self._reports: queue.SimpleQueue[Report | None] = queue.SimpleQueue()
        self._sender = threading.Thread(target=self._send_all, args=(fd,), daemon=True)
        self._sender.start()

    def send(self, report: Report) -> None:
        """Sends a report soon, unless the program is gone."""
        self._reports.put(report)

    def close(self) -> None:
        """Waits a while until everything is sent."""
        self._reports.put(None)
        self._sender.join(CLOSE_SECONDS)

    def _send_all(self, fd: int) -> None:
        # Where the program is gone the job is stopped soon.
        with suppress(OSError), open(fd, "wb", buffering=0) as pipe:
            while (report := self._reports.get()) is not None:
                data = memoryview(msgspec.json.encode(report) + b"\n")
                while data:
                    data = data[pipe.write(data) :]

    def line(self, name: str, text: str, error: bool) -> None:
        self.send(Line(name, text, error))

    def say(self, text: str, *, alarm: bool = False) -> None:
        self.send(Line("", text, True))

    @contextlib.contextmanager
    def watch(self, run: Path) -> Iterator[None]:
        """Reports the progress of the job in a run directory while the context lasts."""
        self.run_dir = run
        self.send(Begun(str(run.resolve())))
        ended = threading.Event()
        thread = threading.Thread(target=self._watch, args=(run, ended), daemon=True)
        thread.start()
        try:
            yield
        finally:
            ended.set()
            thread.join(timeout=2.0)
            with suppress(TriremeError, OSError):
                self.send(_recorded(run))

    def _watch(self, run: Path, ended: threading.Event) -> None:
        before = None
        while not ended.wait(WATCH_SECONDS):
            with suppress(TriremeError, OSError):
                progress = _progress(run)
                if progress != before and not ended.is_set():
                    self.send(progress)
                    before = progress


def _progress(run: Path) -> Progress:
    record = read_record(run)
    if not record.coordinator:
        return _recorded(run)
    status = query(record, timeout=1.0)
    statuses = {
        task.name: {"state": "live", **task.status}
        if task.state == "live"
        else {**task.status, "state": task.state}
        for task in status.tasks
    }
    return _progress_of(statuses, tuple(status.missing))


def _recorded(run: Path) -> Progress:
    record = read_record(run)
    starts = read_starts(run, record.job)
    found = _progress_of({s.begin.task: s.records[-1].status for s in starts if s.records})
    # The states that tasks recorded last are those of their last steps.
    return found if record.state == "running" else msgspec.structs.replace(found, tasks={})


def _progress_of(
    statuses: Mapping[str, Mapping[str, StatusValue]], missing: tuple[str, ...] = ()
) -> Progress:
    """Returns how far a job is, from what its tasks say."""
    workers = [status for name, status in statuses.items() if name.startswith("worker:")]
    losses = [number_of(status, "loss") for status in workers if "loss" in status]
    return Progress(
        step=int(max((number_of(each, "global_step") for each in statuses.values()), default=0)),
        max_steps=int(max((number_of(each, "max_steps") for each in workers), default=0)),
        loss=losses[0] if losses else None,
        examples_per_second=sum(number_of(each, "examples_per_second") for each in workers),
        waits_for=missing,
        tasks={name: str(status.get("state", "")) for name, status in statuses.items()},
    )


def main() -> int:
    """Runs one job and returns its exit status."""
    # Until the launcher handles signals itself, a request to stop ends this process.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    reports = Reports(int(sys.argv[1]))
    requests = os.fdopen(0, "rb", buffering=0, closefd=False)
    try:
        if not (line := requests.readline()):
            raise KeyboardInterrupt
        order = msgspec.json.decode(line, type=Order)
        threading.Thread(target=_obey, daemon=True).start()
        status = start(order.task, order.program, order.name, reports, reports.watch)
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        ended = _ended(status, reports.run_dir)
    except KeyboardInterrupt:
        ended = Ended(status=INTERRUPTED)
    except TriremeError as error:
        usage = isinstance(error, UsageError)
        ended = Ended(status=2 if usage else 1, error=str(error), usage=usage)
    reports.send(ended)
    reports.close()
    return ended.status


def _ended(status: int, run: Path | None) -> Ended:
    with suppress(TriremeError):
        if run is not None:
            record = read_record(run)
            return Ended(status=status, failure=record.failure, traceback=record.traceback)
    return Ended(status=status)


def _obey() -> None:
    while os.read(0, 1):
        os.kill(os.getpid(), signal.SIGTERM)
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    sys.exit(main())

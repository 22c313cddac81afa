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
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import msgspec

from trireme.cli.run import start
from trireme.cli.runs import query
from trireme.errors import TriremeError, UsageError
from trireme.jobs.messages import Begun, Ended, Line, Order, Progress, Report, Said, progress_of
from trireme.launch.exit_reason import INTERRUPTED
from trireme.launch.output import Console
from trireme.launch.run_directory import read_record
from trireme.monitor.job_state import from_cluster, from_records
from trireme.monitor.records import read_starts

WATCH_SECONDS = 0.5
CLOSE_SECONDS = 10.0
_CHUNK_BYTES = 1 << 16


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
        gone = False
        while (report := self._reports.get()) is not None:
            data = memoryview(msgspec.json.encode(report) + b"\n")
            try:
                while data and not gone:
                    data = data[os.write(fd, data) :]
            except OSError:  # the job is stopped soon
                gone = True

    def line(self, name: str, text: str, error: bool) -> None:
        self.send(Line(name, text, error))

    def say(self, text: str, *, alarm: bool = False) -> None:
        self.send(Said(text, alarm))

    @contextlib.contextmanager
    def watch(self, run: Path) -> Iterator[None]:
        """Reports the progress of the job in a run directory while the context lasts."""
        self.run_dir = run
        self.send(Begun(str(run.resolve())))
        ended = threading.Event()
        thread = threading.Thread(
            target=self._watch, args=(run, ended), name="job-watch", daemon=True
        )
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
    return progress_of(from_cluster("", query(record, timeout=1.0), 0.0))


def _recorded(run: Path) -> Progress:
    record = read_record(run)
    return progress_of(from_records("", record.state, read_starts(run, record.job), time.time()))


def main() -> int:
    """Runs one job and returns its exit status."""
    # Until the launcher handles signals itself, a request to stop ends this process.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    reports = Reports(int(sys.argv[1]))
    try:
        order, rest = _read_order()
        threading.Thread(target=_obey, args=(rest,), name="requests", daemon=True).start()
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
    ended = Ended(status=status)
    with suppress(TriremeError):
        if run is not None:
            record = read_record(run)
            ended = Ended(status=status, failure=record.failure, traceback=record.traceback)
    return ended


def _read_order() -> tuple[Order, int]:
    """Returns the order, and how many requests to stop came with it."""
    data = b""
    while b"\n" not in data:
        part = os.read(0, _CHUNK_BYTES)
        if not part:
            raise KeyboardInterrupt
        data += part
    line, _, rest = data.partition(b"\n")
    return msgspec.json.decode(line, type=Order), len(rest)


def _obey(requests: int) -> None:
    """Stops the job whenever the program asks for that, and when the program is gone."""
    while True:
        for _ in range(requests):
            os.kill(os.getpid(), signal.SIGTERM)
        data = os.read(0, 1)
        requests = 1
        if not data:
            os.kill(os.getpid(), signal.SIGTERM)
            return


if __name__ == "__main__":
    sys.exit(main())

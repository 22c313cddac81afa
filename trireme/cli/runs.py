"""The run that a command names: its records, wherever it is, and the status of its running job."""

from __future__ import annotations

import math
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import msgspec

from trireme.certificates import Certificates
from trireme.cli.command import number
from trireme.errors import ConfigurationError, UsageError, WireError
from trireme.launch.config.secret import read_private, read_secret
from trireme.launch.run_directory import RECORD, JobRecord, is_running, read_record
from trireme.location import RemotePath, location
from trireme.stores import open_store

if TYPE_CHECKING:
    from trireme.cluster.member import Observer
    from trireme.cluster.messages import ClusterStatus

ELSEWHERE = "running elsewhere"
"""The state of a job whose uploaded record says that it runs, on another host."""


@contextmanager
def local_run(run: str) -> Iterator[Path]:
    """Yields the directory of a run; of one in an object store, of its job's records.

    That is the scratch directory where the job runs on this host, below this working directory, and
    otherwise a copy of what was uploaded, which is deleted after the block.
    """
    where = location(run)
    if isinstance(where, Path):
        yield where
        return
    scratch = where.scratch
    if is_running(scratch):
        yield scratch
        return
    with TemporaryDirectory(prefix="trireme-") as temporary:
        # `report` names a run by its directory.
        directory = Path(temporary, where.name)
        directory.mkdir()
        _fetch(where, directory)
        yield directory


def _fetch(where: RemotePath, directory: Path) -> None:
    try:
        open_store(where).download(directory)
    except OSError as error:
        raise ConfigurationError(f"the run {where} cannot be read: {error}") from error
    file = directory / RECORD
    if not file.exists():
        return
    try:
        record = msgspec.json.decode(file.read_bytes(), type=JobRecord)
    except (msgspec.MsgspecError, UnicodeError):
        return  # told by who reads it
    if record.state == "running" and record.host != socket.gethostname():
        file.write_bytes(msgspec.json.encode(msgspec.structs.replace(record, state=ELSEWHERE)))


_SECONDS = 0.5
_BAR = 24


def query(record: JobRecord, timeout: float = 5.0) -> ClusterStatus:
    """Asks the coordinator of a running job for the job's status."""
    return observer(record, timeout).query_status()


def observer(record: JobRecord, timeout: float = 5.0) -> Observer:
    """Returns an observer of a running job, which may ask its coordinator."""
    from trireme.cluster.member import Observer

    secret = bytes.fromhex(read_secret(Path(record.secret_file)))
    certificates = None
    if record.certificate_file:
        file = Path(record.certificate_file)
        certificates = Certificates(read_private(file, "the observer's key", "run the job again"))
    return Observer(record.coordinator, record.job, secret, certificates, timeout)


def timeout_seconds(timeout: str) -> float:
    """Returns the value of the option `--timeout`."""
    return number("--timeout", timeout, "a number of seconds", lambda n: 0 <= n < math.inf)


@contextmanager
def job_watch(run: Path, show: Callable[[str | None], None]) -> Iterator[None]:
    """Queries a job's coordinator twice a second, on a thread of its own, and shows a status line.

    The thread and the line end with the context.
    """
    ended = threading.Event()

    def watch() -> None:
        while not ended.wait(_SECONDS):
            line = None
            with suppress(UsageError, WireError):
                record = read_record(run)
                if not record.coordinator:
                    continue
                line = status_line(query(record, timeout=1.0))
            if not ended.is_set():
                show(line)

    thread = threading.Thread(target=watch, name="job-watch", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join(timeout=2.0)
        show(None)


def status_line(status: ClusterStatus) -> str:
    """Returns the status of a job in one line."""
    if status.missing:
        return f"waiting for {', '.join(status.missing)}"
    workers = [task for task in status.tasks if task.role == "worker" and task.status]
    step, end = (
        max((int(worker.status.get(name, 0)) for worker in workers), default=0)
        for name in ("global_step", "max_steps")
    )
    parts = [f"global step {step}"] if step and not end else []
    if end:
        filled = round(_BAR * min(step / end, 1.0))
        parts = [f"{'━' * filled}{'╌' * (_BAR - filled)} global step {step}/{end}"]
    if workers and "loss" in workers[0].status:
        parts.append(f"loss {float(workers[0].status['loss']):.4g}")
    if pace := sum(float(worker.status.get("examples_per_second", 0.0)) for worker in workers):
        parts.append(f"{pace:,.0f} examples/s")
    states = {f"worker:{each.index}": str(each.status.get("state", each.state)) for each in workers}
    if len(set(states.values())) == 1:
        return "  ".join([*parts, *{*states.values()}])
    each_state = ", ".join(f"{name} {state}" for name, state in states.items())
    return "  ".join([*parts, each_state] if states else parts)

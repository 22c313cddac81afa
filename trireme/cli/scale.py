"""`trireme scale RUN --ps N --workers M`: makes a running job larger or smaller."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from trireme.cli.live import observer
from trireme.cli.parser import COMMANDS
from trireme.errors import UsageError, WaitTimeout, WireError
from trireme.launch.run_directory import is_running, read_record

if TYPE_CHECKING:
    from trireme.cluster.messages import ClusterStatus

_PAUSE = 0.2  # seconds between two looks at the job


def main(arguments: Sequence[str]) -> int:
    """Asks a job's coordinator for other numbers of tasks, and waits until the job has them.

    Whoever has started the job starts the new tasks: its launcher does so by itself.

    Returns:
        0 when the job has the numbers and every shard has its copies.

    Raises:
        ConfigurationError: no job was started in that directory, or it cannot be scaled so.
        UsageError: the job does not run, or no number is given.
        WaitTimeout: the job did not get there in time; names what is missing.
    """
    given = COMMANDS["scale"][0]().read(arguments)
    servers, workers = _count("--ps", given.ps), _count("--workers", given.workers)
    if servers is None and workers is None:
        raise UsageError("give --ps, --workers or both: how many there shall be")
    path, timeout = Path(given.run), _seconds(given.timeout)
    record = read_record(path)
    if not is_running(path) or not record.coordinator:
        raise UsageError(f"the job in {path} does not run: {record.state}")
    scaled = observer(record).scale(servers, workers)
    print(f"the job shall have {_tasks(scaled.servers, scaled.workers)}")
    for names, what in ((scaled.awaited, "to start"), (scaled.dismissed, "to leave")):
        if names:
            print(f"{what}: {', '.join(names)}")
    status = _wait(path, time.monotonic() + timeout, timeout)
    print(f"the job has {_tasks(status.servers, status.workers)}")
    return 0


def _wait(path: Path, deadline: float, timeout: float) -> ClusterStatus:
    """Waits until a job has the tasks that it shall have; returns its status.

    Raises:
        WaitTimeout: it has not in time; names what is missing.
    """
    missing = "the coordinator's answer"
    while time.monotonic() < deadline:
        try:
            status = observer(read_record(path)).query_status()
        except WireError as error:
            missing = f"the coordinator: {error}"
        else:
            missing = _missing(status)
            if not missing:
                return status
        time.sleep(_PAUSE)
    raise WaitTimeout(
        f"the job in {path} was not there within {timeout:g} s: it still waits for {missing}; "
        f"`trireme status {path}` shows how it is"
    )


def _missing(status: ClusterStatus) -> str:
    """Returns what a job still waits for; "" if it is as it shall be."""
    if status.phase not in ("forming", "running"):
        return ""  # the job has ended meanwhile
    for role, count in (("ps", status.servers), ("worker", status.workers)):
        tasks = [task for task in status.tasks if task.role == role]
        live = [task for task in tasks if task.state == "live"]
        if len(live) < count:
            absent = [f"{role}:{t.index}" for t in tasks if t.state in ("expected", "lost")]
            return f"{', '.join(absent) or role} to come"
        if len(live) > count:
            return f"{len(live) - count} of role {role} to leave"
    if not status.whole or status.next_shards:
        return "the parameters to move"
    return ""


def _tasks(servers: int, workers: int) -> str:
    return (
        f"{servers} parameter server{'' if servers == 1 else 's'} and "
        f"{workers} worker{'' if workers == 1 else 's'}"
    )


def _count(option: str, text: str | None) -> int | None:
    if text is None:
        return None
    if not text.isdecimal():
        raise UsageError(f"{option} is {text!r}: it must be a number of tasks")
    return int(text)


def _seconds(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise UsageError(f"--timeout is {text!r}: it must be a number of seconds") from None

"""`trireme scale RUN`: changes the number of tasks of a running job."""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from trireme.cli.command import number
from trireme.cli.parser import SCALE
from trireme.cli.runs import observer, timeout_seconds
from trireme.cluster.spec import OBSERVER, check_address, is_loopback, task_name
from trireme.errors import JobFailed, TriremeError, UsageError, WaitTimeout, WireError
from trireme.launch.by_hand import JOB
from trireme.launch.config.secret import find_secret
from trireme.launch.run_directory import JobRecord, is_running, read_record
from trireme.location import local_directory
from trireme.printable import printable

if TYPE_CHECKING:
    from trireme.cluster.member import Observer
    from trireme.cluster.messages import ClusterStatus, Scaled

_POLL_SECONDS = 0.1
_NOTICE_SECONDS = 5.0
_MOST = 65535  # indices of tasks
_COUNT = f"a whole number from 0 to {_MOST}"


def main(arguments: Sequence[str]) -> int:
    """Asks for other numbers of tasks, and waits until the job has them."""
    given = SCALE.parser().read(arguments)
    servers, workers = (
        None if text is None else int(number(option, text, _COUNT, lambda n: n in range(_MOST + 1)))
        for option, text in (("--ps", given.ps), ("--workers", given.workers))
    )
    if servers is None and workers is None:
        raise UsageError("say how many tasks the job shall have: --ps N, --workers M, or both")
    timeout = timeout_seconds(given.timeout)
    record = None if given.run is None else _running(local_directory(given.run))
    coordinator = _coordinator_by_hand(given) if record is None else observer(record)
    began = time.monotonic()
    scaled = coordinator.scale(servers, workers)
    _tell(scaled, coordinator.query_status(), by_hand=record is None)
    _wait(
        coordinator,
        scaled,
        began + timeout,
        timeout,
        None if record is None else local_directory(given.run),
    )
    seconds = time.monotonic() - began
    print(f"the job has {_numbers(scaled.servers, scaled.workers)} after {seconds:.1f} s")
    return 0


def _running(run: Path) -> JobRecord:
    record = read_record(run)
    if not is_running(run):
        raise UsageError(f"the job in {run} is over ({record.state}): it cannot be scaled")
    if not record.options.get("ps"):
        raise UsageError(
            f"the job in {run} has no parameter servers: its workers hold the model together, and "
            "keep their number until it is started again"
        )
    if not record.coordinator:
        raise UsageError(f"the job in {run} has only just been started: try again in a second")
    return record


def _coordinator_by_hand(given: argparse.Namespace) -> Observer:
    from trireme.certificates import Certificates, encryption
    from trireme.cluster.member import Observer

    if given.coordinator is None:
        raise UsageError(
            "name the job: trireme scale RUN, or --coordinator HOST:PORT for one started by hand"
        )
    check_address("the coordinator", given.coordinator)
    certificates, scheme = None, "tcp"
    if given.certs is not None:
        certificates, scheme = Certificates(encryption().read(given.certs, OBSERVER)), "tls"
    secret = find_secret(
        given.secret_file,
        os.environ,
        loopback=is_loopback(given.coordinator),
        certificates=given.certs,
    )
    address = f"{scheme}://{given.coordinator}"
    return Observer(address, JOB, bytes.fromhex(secret), certificates)


def _numbers(servers: int, workers: int) -> str:
    return (
        f"{servers} {'server' if servers == 1 else 'servers'} and "
        f"{workers} {'worker' if workers == 1 else 'workers'}"
    )


def _tell(scaled: Scaled, status: ClusterStatus, *, by_hand: bool) -> None:
    """Prints what is going to happen, and what the user has to do for it."""
    print(f"the job shall have {_numbers(scaled.servers, scaled.workers)}")
    if scaled.awaited and not by_hand:
        print(f"  its launcher starts {', '.join(scaled.awaited)}")
    for name in scaled.awaited if by_hand else ():
        print(printable(f"  start {name} on its machine: {_command(name, status)}"))
    if scaled.dismissed:
        verb = "is" if len(scaled.dismissed) == 1 else "are"
        print(f"  {', '.join(scaled.dismissed)} {verb} to leave")


def _command(name: str, status: ClusterStatus) -> str:
    role, _, index = name.partition(":")
    servers = [t.address.rpartition("/")[2] for t in status.tasks if t.role == "ps" and t.address]
    more = {"ps": ",HOST:PORT", "worker": ""}[role]
    workers = "the same, and HOST:PORT" if role == "worker" else "the same"
    return (
        f"trireme task --job-name {role} --task-index {index} --ps-hosts "
        f"{','.join(servers)}{more} --worker-hosts ({workers}) ..."
    )


def _wait(
    coordinator: Observer, scaled: Scaled, deadline: float, timeout: float, run: Path | None
) -> None:
    noticed = time.monotonic()
    while True:
        try:
            status = coordinator.query_status()
            what = pending(status)
        except WireError as error:  # it is being started again, or the job has ended
            status, what = None, [f"the coordinator, which does not answer ({error})"]
            if run is not None and not is_running(run):
                raise JobFailed(f"the job has ended meanwhile, {read_record(run).state}") from None
        if status is not None and status.phase not in ("forming", "running"):
            raise JobFailed(f"the job has ended meanwhile, {status.phase}: {status.reason}")
        if status is not None:
            check_not_replaced(scaled, status)
        if not what:
            return
        now = time.monotonic()
        if now >= deadline:
            after = f"after {timeout:g} s the job still waits for {'; '.join(what)}"
            if status is None:
                raise WaitTimeout(f"{after}. Perhaps it has ended: `trireme status` shows it")
            raise WaitTimeout(f"{after}. It goes on: `trireme status` shows it")
        if now >= noticed + _NOTICE_SECONDS:
            noticed = now
            print(printable(f"  waiting for {'; '.join(what)}"), flush=True)
        time.sleep(_POLL_SECONDS)


def check_not_replaced(scaled: Scaled, status: ClusterStatus) -> None:
    """Checks that a job still is to have the numbers that this request has asked for."""
    if (status.servers, status.workers) != (scaled.servers, scaled.workers):
        raise TriremeError(
            f"another request has replaced this one, for "
            f"{_numbers(scaled.servers, scaled.workers)}: the job shall have "
            f"{_numbers(status.servers, status.workers)} now"
        )


def pending(status: ClusterStatus) -> list[str]:
    """Returns what has to happen until a job is as large as it is to be; empty when it is."""
    wanted = [t for t in status.tasks if not t.dismissed and t.state != "left"]
    what = [
        f"{task_name(task.role, task.index)} ({task.reason})"
        for task in wanted
        if task.state != "live"
    ]
    what += [
        f"{task_name(task.role, task.index)} to leave"
        for task in status.tasks
        if task.dismissed and task.state in ("live", "disconnected")
    ]
    if what or not status.shards:
        return what
    if not status.whole:
        return ["the copies of every shard"]
    primaries = {shard.primary for shard in status.shards}
    idle = [t.index for t in wanted if t.role == "ps" and t.index not in primaries]
    if status.next_shards or idle:
        return [f"the shares of {', '.join(task_name('ps', i) for i in idle) or 'the servers'}"]
    return []

"""`trireme scale RUN`: changes the number of tasks of a running job."""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from trireme.cli.command import number
from trireme.cli.runs import observer
from trireme.cluster.spec import OBSERVER, check_address, is_loopback
from trireme.control.entry import SCALE
from trireme.control.stop import timeout_seconds
from trireme.errors import ConfigurationError, JobFailed, UsageError, WaitTimeout, WireError
from trireme.job_config import OPTIONS, JobConfig
from trireme.launch.config.task_config import BY_HAND
from trireme.launch.environment import ENVIRONMENTS, LAUNCHERS
from trireme.launch.run_directory import JobRecord, is_running, read_record
from trireme.location import local_directory
from trireme.printable import counted, printable
from trireme.strategies import choose

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
    run = None if given.run is None else local_directory(given.run)
    if run is None:
        coordinator = _coordinator_by_hand(given)
    else:
        coordinator = observer(record := _running(run))
        _ask_strategy(record, coordinator.query_status(), servers, workers)
    began = time.monotonic()
    scaled = coordinator.scale(servers, workers)
    print(f"the job shall have {_numbers(scaled)}")
    if scaled.awaited:
        how = "its launcher starts" if run is not None else "start by `trireme task`"
        print(f"  {how} {', '.join(scaled.awaited)}")
    if scaled.dismissed:
        print(f"  to leave: {', '.join(scaled.dismissed)}")
    status = _wait(coordinator, began + timeout, timeout, run)
    print(f"the job has {_numbers(status)} after {time.monotonic() - began:.1f} s")
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


def _ask_strategy(
    record: JobRecord, now: ClusterStatus, servers: int | None, workers: int | None
) -> None:
    """Checks that the strategy of the launch takes such a job, as it does once all start again."""
    known = {option.field for option in OPTIONS}
    given = {field: value for field, value in record.options.items() if field in known}
    config = JobConfig().replaced("trireme run", **given)
    if config.training.strategy is None:
        return  # the program chooses
    sizes = (
        now.workers if workers is None else workers,
        now.servers if servers is None else servers,
    )
    try:
        choose(config, workers=sizes[0], servers=sizes[1])
    except ConfigurationError as error:
        raise ConfigurationError(f"the job is not scaled: {error}") from error


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
    loopback = is_loopback(given.coordinator)
    secret = ENVIRONMENTS.load(LAUNCHERS).secret(
        given.secret_file, os.environ, loopback=loopback, certificates=given.certs
    )
    address = f"{scheme}://{given.coordinator}"
    return Observer(address, BY_HAND, bytes.fromhex(secret), certificates)


def _numbers(job: Scaled | ClusterStatus) -> str:
    return f"{counted(job.servers, 'server')} and {counted(job.workers, 'worker')}"


def _wait(
    coordinator: Observer, deadline: float, timeout: float, run: Path | None
) -> ClusterStatus:
    """Waits until the job is as large as it is to be."""
    noticed = time.monotonic()
    while True:
        status = None
        try:
            status = coordinator.query_status()
            what = pending(status)
        except WireError as error:  # it is being started again, or the job has ended
            what = [f"the coordinator, which does not answer ({error})"]
            if run is not None and not is_running(run):
                raise JobFailed(f"the job has ended meanwhile, {read_record(run).state}") from None
        if status is not None and status.phase not in ("forming", "running"):
            raise JobFailed(f"the job has ended meanwhile, {status.phase}: {status.reason}")
        if status is not None and not what:
            return status
        now = time.monotonic()
        if now >= deadline:
            raise WaitTimeout(
                f"after {timeout:g} s the job still waits for {'; '.join(what)}: `trireme status` "
                "shows how it goes on"
            )
        if now >= noticed + _NOTICE_SECONDS:
            noticed = now
            print(printable(f"  waiting for {'; '.join(what)}"), flush=True)
        time.sleep(_POLL_SECONDS)


def pending(status: ClusterStatus) -> list[str]:
    """Returns what has to happen until a job is as large as it is to be; empty when it is."""
    wanted = [task for task in status.tasks if not task.dismissed and task.state != "left"]
    what = [f"{task.name} ({task.reason})" for task in wanted if task.state != "live"]
    what += [
        f"{task.name} to leave"
        for task in status.tasks
        if task.dismissed and task.state in ("live", "disconnected")
    ]
    if what or not status.shards:
        return what
    primaries = {shard.primary for shard in status.shards}
    idle = [t.name for t in wanted if t.role == "ps" and t.index not in primaries]
    return (
        [] if status.whole and not idle else [f"the shares of {', '.join(idle) or 'the servers'}"]
    )

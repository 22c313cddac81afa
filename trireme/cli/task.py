"""`trireme task`: one task of a job in this process, started by hand or by `trireme run`."""

from __future__ import annotations

import argparse
import logging
import os
import signal
import time
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from trireme.cli.options import read_settings
from trireme.cli.parser import COMMANDS, TASK_OPTIONS
from trireme.errors import JobFailed, TriremeError, UsageError
from trireme.launch.allocator import keep_freed_memory
from trireme.launch.attendance import Attendance, AttendanceFile, Lost
from trireme.launch.command import LOOPBACK
from trireme.launch.detect import TASK_VARIABLE, TaskConfig, detect, encode_task, tf_options
from trireme.launch.manual import ManualOptions, ManualTask, manual_task
from trireme.launch.outcome import describe, write_outcome
from trireme.launch.scheduling import take_turns
from trireme.launch.script import check_script, run_script
from trireme.launch.secret import SECRET_VARIABLE, handed_over
from trireme.launch.settings import check_together, suggestion
from trireme.launch.tether import tether
from trireme.launch.tf_config import TF_VARIABLE, TfTask, read_tf_config
from trireme.launch.threads import thread_variables
from trireme.metrics import Registry

if TYPE_CHECKING:
    from trireme.cluster.coordinator import Coordinator
    from trireme.cluster.messages import JobOver
    from trireme.cluster.state import Policy

__all__ = ["main"]

_ROLES = ("ps", "worker", "coordinator", "aggregator")


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a task that serves others listens, and whom it tells.

    Attributes:
        name: what to write before each line: the task's name, unless the launcher does it.
        listen: the address with its scheme.
        hosts_coordinator: whether the job's coordinator is served there.
        address_file: where to write the address that was got, if anywhere.
        attendance_file: where a coordinator writes who takes part, if anywhere.
    """

    name: str
    listen: str
    hosts_coordinator: bool
    address_file: Path | None
    attendance_file: Path | None = None


def main(arguments: Sequence[str]) -> int:
    """Runs the task and returns its exit status.

    Raises:
        UsageError: the options name no task, or there is no such program.
    """
    parser = COMMANDS["task"][0]()
    options, program = parser.split(arguments)
    given = parser.parse_args(options)
    keep_freed_memory(os.environ)
    if given.tied_to is not None:
        tether(int(given.tied_to))
        return _launched(given, detect(os.environ), program)
    return _by_hand(given, program)


def _launched(given: argparse.Namespace, config: TaskConfig, program: Sequence[str]) -> int:
    """Runs a task whose launcher has put all that there is to know into the environment."""
    outcome = Path(given.outcome_file) if given.outcome_file is not None else None
    if config.strategy == "sync" or (config.processes > 1 and not config.servers):
        take_turns()
    if config.role == "worker":
        return run_script(check_script(program[0]), program[1:], outcome=outcome)
    place = _Place(
        name="",
        listen=f"tcp://{given.listen_host or LOOPBACK}:0",
        hosts_coordinator=config.role == "coordinator",
        address_file=_path(given.address_file),
        attendance_file=_path(given.attendance_file),
    )
    logging.basicConfig(level=logging.WARNING, format=f"{place.name}%(message)s")
    try:
        if config.role == "aggregator":
            return _serve_aggregator(config, place)
        over = _serve(config, place)
    except TriremeError as error:
        if outcome is not None:
            write_outcome(outcome, describe(error))
        raise
    if over is not None and over.outcome == "failed" and outcome is not None:
        write_outcome(outcome, describe(JobFailed(_ending(over))))
    return _say_end(place, over)


def _by_hand(given: argparse.Namespace, program: Sequence[str]) -> int:
    _expand_classic(given)
    settings = read_settings(given, os.environ, TASK_OPTIONS)
    task = manual_task(_manual_options(given), settings, os.environ)
    config = task.config
    check_together(settings, config.workers, config.servers)
    threads, variables = thread_variables(os.environ, task.neighbours)
    config = msgspec.structs.replace(config, threads=threads)
    with handed_over(config.secret, config.job) as secret:
        _export(os.environ, variables, config, secret)
        return _start_by_hand(given, task, config, program)


def _start_by_hand(
    given: argparse.Namespace, task: ManualTask, config: TaskConfig, program: Sequence[str]
) -> int:
    if config.strategy == "sync" or (config.processes > 1 and not config.servers):
        take_turns()
    if config.role == "worker":
        if not program:
            raise UsageError(f"{config.name} needs a program: add SCRIPT [ARGS...] at the end")
        return run_script(check_script(program[0]), program[1:], task=config.name)
    place = _Place(
        name=f"{config.name} ",
        listen=task.listen,
        hosts_coordinator=task.hosts_coordinator,
        address_file=_path(given.address_file),
    )
    logging.basicConfig(level=logging.WARNING, format=f"{place.name}%(message)s")
    if config.role == "aggregator":
        return _serve_aggregator(config, place)
    return _say_end(place, _serve(config, place))


# Classic spellings -------------------------------------------------------------------------------


def _expand_classic(given: argparse.Namespace) -> None:
    """Turns `--sync-replicas` and `--replicas-to-aggregate` into today's options."""
    if given.sync_replicas is not None:
        if given.sync_replicas.lower() not in ("true", "false", "1", "0", "yes", "no"):
            raise UsageError(f"--sync-replicas is {given.sync_replicas!r}: say true or false")
        if given.sync_replicas.lower() in ("true", "1", "yes"):
            if given.strategy not in (None, "sync"):
                raise UsageError(
                    f"--sync-replicas and --strategy {given.strategy} contradict each other"
                )
            given.strategy = "sync"
    if given.replicas_to_aggregate is not None:
        if given.aggregate not in (None, given.replicas_to_aggregate):
            raise UsageError("--replicas-to-aggregate and --aggregate contradict each other")
        given.aggregate = given.replicas_to_aggregate


def _manual_options(given: argparse.Namespace) -> ManualOptions:
    tf = _tf_task(given)
    if tf is not None:
        return replace(
            tf_options(tf, os.environ),
            secret_file=_path(given.secret_file),
            allow_plaintext=given.allow_plaintext or tf_options(tf, os.environ).allow_plaintext,
        )
    for name in ("job_name", "ps_hosts", "worker_hosts"):
        if getattr(given, name) is None:
            raise UsageError(
                f"--{name.replace('_', '-')} is missing: every task needs --job-name, "
                "--task-index, --ps-hosts and --worker-hosts"
            )
    if given.job_name not in _ROLES:
        raise UsageError(
            f"--job-name is {given.job_name!r}{suggestion(given.job_name, _ROLES)}; there are: "
            f"{', '.join(_ROLES)}"
        )
    return ManualOptions(
        role=given.job_name,
        index=_index(given.task_index),
        ps_hosts=given.ps_hosts,
        worker_hosts=given.worker_hosts,
        coordinator=given.coordinator,
        secret_file=_path(given.secret_file),
        allow_plaintext=given.allow_plaintext,
    )


def _tf_task(given: argparse.Namespace) -> TfTask | None:
    """Returns the task of `TF_CONFIG`, where no flag names another.

    Raises:
        UsageError: it names a cluster without servers.
    """
    flags = (given.job_name, given.task_index, given.ps_hosts, given.worker_hosts)
    text = os.environ.get(TF_VARIABLE, "")
    tf = read_tf_config(text) if text.strip() and flags == (None,) * len(flags) else None
    if tf is not None and not tf.ps:
        raise UsageError(
            f"{TF_VARIABLE} names no parameter server, so every task is the program itself: start "
            'it by `python SCRIPT`, or name the servers under "ps"'
        )
    return tf


def _index(text: str | None) -> int:
    try:
        return int(text) if text is not None else 0
    except ValueError:
        raise UsageError(f"--task-index is {text!r}: it must be a whole number from 0") from None


def _path(text: str | None) -> Path | None:
    return Path(text) if text is not None else None


def _export(
    environ: MutableMapping[str, str],
    variables: dict[str, str],
    config: TaskConfig,
    secret: int | None,
) -> None:
    """Tells the program in this process, before it imports PyTorch, what it is.

    What the program starts in turn inherits all of that but the secret.
    """
    environ.update(variables)
    environ.pop(SECRET_VARIABLE, None)
    if secret is not None:
        config = msgspec.structs.replace(config, secret="", secret_fd=secret)
    environ[TASK_VARIABLE] = encode_task(config)


# Servers and the coordinator ---------------------------------------------------------------------


def _serve(config: TaskConfig, place: _Place) -> JobOver | None:
    if config.role == "coordinator":
        return _serve_coordinator(config, place)
    return _serve_parameters(config, place)


def _policy(config: TaskConfig) -> Policy:
    from trireme.cluster.state import Policy

    return Policy(
        workers=config.workers,
        servers=config.servers,
        join_timeout=config.join_timeout,
        progress_timeout=config.progress_timeout,
        wait_for_restart=config.join_timeout if config.restarts_left else 0.0,
    )


def _serve_coordinator(config: TaskConfig, place: _Place) -> JobOver | None:
    """Serves the coordinator alone until the job is over and everybody was told."""
    from trireme.cluster.coordinator import Coordinator
    from trireme.cluster.state import cluster_status
    from trireme.monitor.membership_metrics import MembershipMetrics
    from trireme.wire.service import Service
    from trireme.wire.transport import listen

    listener = listen(place.listen, allow_plaintext=config.allow_plaintext)
    coordinator = Coordinator(_policy(config), on_done=lambda: service.stop())
    service = Service(
        listener,
        [coordinator],
        job=config.job,
        secret=bytes.fromhex(config.secret),
        epoch=coordinator.epoch,
        serves=("coordinator:0",),
    )
    _tell_address(place, listener.address)
    membership = MembershipMetrics()
    file = place.attendance_file
    with (
        _exposed(
            config,
            membership.registry,
            place,
            lambda: membership.take(cluster_status(time.monotonic(), coordinator.state)),
        ),
        nullcontext() if file is None else AttendanceFile(file, lambda: _attendance(coordinator)),
    ):
        service.run()
    return coordinator.over


def _attendance(coordinator: Coordinator) -> Attendance:
    """Returns what a launcher is to know of the membership."""
    tasks = coordinator.state.tasks.values()
    return Attendance(
        joined=any(task.role == "worker" and task.incarnation > 0 for task in tasks),
        formed=coordinator.state.phase != "forming",
        lost=tuple(
            Lost(task.name, task.pid, task.reason) for task in tasks if task.state == "lost"
        ),
    )


def _serve_parameters(config: TaskConfig, place: _Place) -> JobOver | None:
    """Serves one shard of the parameters until the job is over."""
    from trireme.ps.server import ServerConfig, serve

    server = ServerConfig(
        job=config.job,
        secret=bytes.fromhex(config.secret),
        index=config.index,
        listen=place.listen,
        coordinator=None if place.hosts_coordinator else config.coordinator,
        policy=_policy(config),
        allow_plaintext=config.allow_plaintext,
        share_memory=config.transport == "auto",
    )
    registry, record = Registry(), _recorded(config)
    with _exposed(config, registry, place):
        return serve(
            server,
            on_listening=lambda address: _tell_address(place, address),
            registry=registry,
            record=record,
        )


def _exposed(
    config: TaskConfig,
    registry: Registry,
    place: _Place,
    look: Callable[[], object] = lambda: None,
) -> AbstractContextManager[object]:
    """Serves a task's metrics while the block runs, if that is asked for."""
    if config.metrics_port is None:
        return nullcontext()
    from trireme.monitor.prometheus import expose

    exposition = expose(registry, config.name, config.metrics_host, config.scrape_port, look)
    if exposition is None:
        return nullcontext()
    print(f"{place.name}metrics: {exposition.address}", flush=True)
    return exposition


def _recorded(config: TaskConfig) -> Callable[[Mapping[str, float | str], bool], None]:
    """Returns what writes a server's reports to its records, where it has some."""
    if config.records is None:
        return lambda status, last: None
    from trireme.monitor.records import Record, RecordWriter, begin_here

    writer = RecordWriter(Path(config.records), begin_here(config.name, config.job, None))

    def record(status: Mapping[str, float | str], last: bool) -> None:
        writer.write(Record(time=time.time(), status=dict(status)), due=last)

    return record


def _serve_aggregator(config: TaskConfig, place: _Place) -> int:
    """Sums the updates of the workers of this host until they have left, or SIGTERM."""
    from trireme.ps.aggregator import Aggregator, AggregatorConfig

    aggregator = Aggregator(
        AggregatorConfig(
            job=config.job,
            secret=bytes.fromhex(config.secret),
            coordinator=config.coordinator,
            join_timeout=config.join_timeout,
        )
    )
    signal.signal(signal.SIGTERM, lambda *_: aggregator.stop())
    _tell_address(place, aggregator.address)
    aggregator.run()
    sums, updates = aggregator.sums
    print(f"{place.name}ends: {updates} updates went to the server in {sums} sums", flush=True)
    return 0


def _tell_address(place: _Place, address: str) -> None:
    if place.address_file is not None:
        beside = place.address_file.with_name(f"{place.address_file.name}.{os.getpid()}")
        beside.write_text(address + "\n", encoding="utf-8")
        beside.replace(place.address_file)
    print(f"{place.name}listens on {address}", flush=True)


def _ending(over: JobOver) -> str:
    if over.outcome != "failed":
        return f"the job is {over.outcome}"
    return f"the job failed: {over.culprit}: {over.reason}"


def _say_end(place: _Place, over: JobOver | None) -> int:
    failed = over is not None and over.outcome == "failed"
    how = "stopped" if over is None else _ending(over)
    if failed and not place.name:
        how = "the job failed"  # why, its launcher says
    print(f"{place.name}ends: {how}", flush=True)
    return 1 if failed else 0

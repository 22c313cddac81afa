"""One task started by hand: the classic flags become a `TaskConfig` and an address to listen at."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from trireme.cluster.spec import ClusterSpec, is_loopback
from trireme.errors import ConfigurationError
from trireme.launch.secret import find_secret
from trireme.launch.settings import Settings
from trireme.launch.task_config import Role, TaskConfig

__all__ = ["JOB", "ManualOptions", "ManualTask", "manual_task"]

JOB = "by-hand"
"""The id of every job started by hand: nobody could make one up for all of its tasks. Address and
secret keep such jobs apart."""


@dataclass(frozen=True, slots=True)
class ManualOptions:
    """The classic flags of one task.

    Attributes:
        role: `ps`, `worker`, `coordinator` or `aggregator`.
        index: which of them.
        ps_hosts: the servers as `host:port`, with commas between them.
        worker_hosts: the workers, likewise.
        coordinator: `host:port` of a task of that role; None where `ps:0` hosts the coordinator.
        secret_file: the file with the job's secret, if the user named one.
        allow_plaintext: whether a server may listen beyond this host without TLS.
    """

    role: str
    index: int
    ps_hosts: str
    worker_hosts: str
    coordinator: str | None = None
    secret_file: Path | None = None
    allow_plaintext: bool = False


@dataclass(frozen=True, slots=True)
class ManualTask:
    """What to run.

    Attributes:
        config: the task.
        listen: the address, with its scheme, of a server or a coordinator; "" for others.
        hosts_coordinator: whether the coordinator is served on the same address.
        neighbours: how many tasks share this host, as far as can be told.
    """

    config: TaskConfig
    listen: str
    hosts_coordinator: bool
    neighbours: int


def manual_task(
    options: ManualOptions, settings: Settings, environ: Mapping[str, str]
) -> ManualTask:
    """Returns what the flags of one task mean.

    Args:
        options: the classic flags.
        settings: strategy, run directory and the other options that `trireme run` has too.
        environ: the environment, which may hold the secret.

    Raises:
        ConfigurationError: the flags name no cluster, or no task of it; or the secret is missing.
    """
    spec = ClusterSpec.from_hosts(options.ps_hosts, options.worker_hosts, options.coordinator)
    if not spec.ps:
        raise ConfigurationError(
            "a job started by hand needs a parameter server: name at least one host:port with "
            "--ps-hosts, the same for every task"
        )
    if options.role != "aggregator":  # of which each host has one, and nobody a list
        spec.check_task(options.role, options.index)
    if options.role == "coordinator" and spec.coordinator is None:
        raise ConfigurationError(
            "a task of role coordinator needs its address: give --coordinator host:port to it and "
            "to every other task; without one, ps:0 hosts the coordinator"
        )
    loopback = all(is_loopback(address) for address in _addresses(spec))
    secret, origin = find_secret(options.secret_file, environ, loopback=loopback)
    return ManualTask(
        config=_config(options, settings, spec, secret, origin),
        listen=_listen(spec, options),
        hosts_coordinator=options.role == "coordinator"
        or (options.role == "ps" and options.index == 0 and spec.coordinator is None),
        neighbours=len(spec.ps) + len(spec.worker) if loopback else 1,
    )


def _config(
    options: ManualOptions, settings: Settings, spec: ClusterSpec, secret: str, origin: str
) -> TaskConfig:
    return TaskConfig(
        job=JOB,
        role=cast(Role, options.role),
        index=options.index,
        workers=len(spec.worker),
        servers=len(spec.ps),
        coordinator=_tcp(spec.coordinator_address),
        secret=secret,
        run_dir=settings["run-dir"],
        strategy=settings["strategy"],
        aggregate=settings["aggregate"],
        staleness=settings["staleness"],
        every=settings["every"],
        prefetch=settings["prefetch"],
        transport=settings["transport"],
        host_aggregator=settings["host-aggregator"],
        compress=settings["compress"],
        overlap=settings["overlap"],
        profile=settings["profile"],
        metrics_port=settings["metrics-port"],
        metrics_host=settings["metrics-host"],
        join_timeout=settings["join-timeout"],
        progress_timeout=settings["progress-timeout"],
        connect_timeout=settings["join-timeout"],
        allow_plaintext=options.allow_plaintext,
        origins=settings.origins | {"secret": origin},
    )


def _listen(spec: ClusterSpec, options: ManualOptions) -> str:
    """Returns where a server or a coordinator listens."""
    if options.role not in ("ps", "coordinator"):
        return ""
    return _tcp(spec.address(options.role, options.index))


def _tcp(address: str) -> str:
    return f"tcp://{address}"


def _addresses(spec: ClusterSpec) -> list[str]:
    return [address for address in (*spec.ps, *spec.worker, spec.coordinator) if address]

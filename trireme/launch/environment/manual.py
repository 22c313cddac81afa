"""One task started by hand: the classic flags become a `TaskConfig` and an address to listen at."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from trireme.cluster.spec import ClusterSpec, is_loopback
from trireme.errors import ConfigurationError
from trireme.job_config import JobConfig
from trireme.launch.config.secret import find_secret
from trireme.launch.config.task_config import Role, TaskConfig

__all__ = ["JOB", "ManualOptions", "ManualTask", "manual_task"]

JOB = "by-hand"
"""The id of every job started by hand, as there is no launcher to choose one for all of its tasks.
Address and secret keep such jobs apart."""


@dataclass(frozen=True, slots=True)
class ManualOptions:
    """The classic flags of one task.

    Attributes:
        role: `ps`, `worker` or `coordinator`.
        index: the task's index.
        ps_hosts: the servers as `host:port`, with commas between them.
        worker_hosts: the workers, likewise.
        coordinator: `host:port` of a task of role coordinator; None where `ps:0` hosts it.
        secret_file: the file with the job's secret, if the user named one.
    """

    role: str
    index: int
    ps_hosts: str
    worker_hosts: str
    coordinator: str | None = None
    secret_file: Path | None = None


@dataclass(frozen=True, slots=True)
class ManualTask:
    """A task that was started by hand.

    Attributes:
        task: its configuration.
        listen: the address, with its scheme, at which a server or a coordinator listens; "" for a
            worker.
        hosts_coordinator: whether the coordinator is served at the same address.
        neighbours: how many tasks share this host, as far as that is known.
    """

    task: TaskConfig
    listen: str
    hosts_coordinator: bool
    neighbours: int


def manual_task(
    options: ManualOptions, config: JobConfig, environ: Mapping[str, str]
) -> ManualTask:
    """Returns the task that the classic flags describe.

    Args:
        options: the classic flags.
        config: the options that `trireme run` has too.
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
    spec.check_task(options.role, options.index)
    if options.role == "coordinator" and spec.coordinator is None:
        raise ConfigurationError(
            "a task of role coordinator needs its address: give --coordinator host:port to it and "
            "to every other task; without one, ps:0 hosts the coordinator"
        )
    loopback = all(is_loopback(address) for address in _addresses(spec))
    secret, _ = find_secret(options.secret_file, environ, loopback=loopback)
    return ManualTask(
        task=_task(options, config, spec, secret),
        listen=_listen(spec, options),
        hosts_coordinator=options.role == "coordinator"
        or (options.role == "ps" and options.index == 0 and spec.coordinator is None),
        neighbours=len(spec.ps) + len(spec.worker) if loopback else 1,
    )


def _task(options: ManualOptions, config: JobConfig, spec: ClusterSpec, secret: str) -> TaskConfig:
    return TaskConfig(
        job=JOB,
        role=cast(Role, options.role),
        index=options.index,
        workers=len(spec.worker),
        servers=len(spec.ps),
        coordinator=_tcp(spec.coordinator_address),
        secret=secret,
        config=config.replaced("the hosts", workers=len(spec.worker), ps=len(spec.ps)),
        connect_timeout=config.join_timeout,
    )


def _listen(spec: ClusterSpec, options: ManualOptions) -> str:
    """Returns the address at which a server or a coordinator listens."""
    if options.role not in ("ps", "coordinator"):
        return ""
    return _tcp(spec.address(options.role, options.index))


def _tcp(address: str) -> str:
    return f"tcp://{address}"


def _addresses(spec: ClusterSpec) -> list[str]:
    return [address for address in (*spec.ps, *spec.worker, spec.coordinator) if address]

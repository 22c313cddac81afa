"""One task of a job that is started by hand."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import cast

from trireme.cluster.spec import ClusterTask, is_loopback
from trireme.errors import ConfigurationError
from trireme.job_config import JobConfig
from trireme.launch.config.secret import find_secret
from trireme.launch.config.task_config import Role, TaskConfig
from trireme.launch.process_setup.resources import threads_of_task

__all__ = ["JOB", "manual_task"]

JOB = "by-hand"
"""The id of every job started by hand, as there is no launcher to choose one for all of its tasks.
Address and secret keep such jobs apart."""


def manual_task(
    named: ClusterTask,
    config: JobConfig,
    environ: Mapping[str, str],
    secret_file: Path | None = None,
) -> TaskConfig:
    """Returns a task of a cluster.

    Args:
        named: the task; where its cluster has no address of the coordinator, `ps:0` hosts it.
        config: the options that `trireme run` has too.
        environ: the environment, which may hold the secret.
        secret_file: the file with the job's secret, if the user named one.

    Raises:
        ConfigurationError: there is no such task, or no server; or the secret is missing.
        UsageError: the options are not consistent.
    """
    role, index, cluster = named.role, named.index, named.cluster
    if not cluster.ps:
        raise ConfigurationError(
            "a job started by hand needs a parameter server: name at least one host:port with "
            "--ps-hosts, the same for every task"
        )
    cluster.check_task(role, index)
    if role == "coordinator" and cluster.coordinator is None:
        raise ConfigurationError(
            "a task of role coordinator needs its address: give --coordinator host:port to it and "
            "to every other task; without one, ps:0 hosts the coordinator"
        )
    addresses = [a for a in (*cluster.ps, *cluster.worker, cluster.coordinator) if a]
    loopback = all(map(is_loopback, addresses))
    secret, _ = find_secret(secret_file, environ, loopback=loopback)
    workers, servers = len(cluster.worker), len(cluster.ps)
    config = config.replaced("the hosts", workers=workers, ps=servers)
    config.check_together(servers)
    return TaskConfig(
        job=JOB,
        role=cast(Role, role),
        index=index,
        workers=workers,
        servers=servers,
        coordinator=f"tcp://{cluster.coordinator_address}",
        listen="" if role == "worker" else f"tcp://{cluster.address(role, index)}",
        secret=secret,
        config=config,
        connect_timeout=config.join_timeout,
        # Of other hosts it is not known which tasks share them.
        threads=threads_of_task(environ, workers + servers if loopback else 1),
    )

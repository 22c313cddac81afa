"""The tasks of a job that is started by hand, each on its machine."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import cast

from trireme.certificates import encryption
from trireme.cluster.spec import ROLES, is_loopback
from trireme.environments.cluster import ClusterSpec, ClusterTask
from trireme.environments.secret import find_secret
from trireme.errors import ConfigurationError, UsageError, suggestion
from trireme.job_config import TASK_OPTIONS, JobConfig, Option
from trireme.launch.config.task_config import BY_HAND, Role, TaskConfig
from trireme.launch.hooks import with_hooks
from trireme.launch.process_setup.resources import threads_of_task
from trireme.location import local_directory

TRUE, FALSE = ("true", "1", "yes"), ("false", "0", "no")

Flags = Mapping[str, str | None]
"""The values of the classic flags, by their names; None for one that was not given."""

_log = logging.getLogger(__name__)


def task_options() -> tuple[Option, ...]:
    """Returns the options of a task that is started by hand."""
    return (*TASK_OPTIONS, *with_hooks().options)


def classic_task(flags: Flags) -> ClusterTask:
    """Returns the task that the classic flags name."""
    names = ("job_name", "ps_hosts", "worker_hosts")
    job_name, ps_hosts, worker_hosts = (flags.get(name) for name in names)
    if job_name is None or ps_hosts is None or worker_hosts is None:
        missing = next(name for name in names if flags.get(name) is None)
        raise UsageError(
            f"--{missing.replace('_', '-')} is missing: every task needs --job-name, "
            "--task-index, --ps-hosts and --worker-hosts"
        )
    if job_name not in ROLES:
        raise UsageError(
            f"--job-name is {job_name!r}{suggestion(job_name, ROLES)}; the roles are: "
            f"{', '.join(ROLES)}"
        )
    index = flags.get("task_index") or "0"
    if not index.lstrip("-").isdecimal():
        raise UsageError(f"--task-index is {index!r}: it must be a whole number from 0")
    cluster = ClusterSpec.from_hosts(ps_hosts, worker_hosts, flags.get("coordinator"))
    return ClusterTask(job_name, int(index), cluster)


def classic_strategy(flags: Flags) -> str | None:
    """Returns the strategy, which is `sync` with `--sync-replicas`."""
    text, strategy = flags.get("sync_replicas"), flags.get("strategy")
    if text is None or text.lower() in FALSE:
        return strategy
    if text.lower() not in TRUE:
        raise UsageError(f"--sync-replicas is {text!r}: it must be true or false")
    if strategy not in (None, "sync"):
        raise UsageError(f"--sync-replicas and --strategy {strategy} contradict each other")
    return "sync"


def manual_task(
    named: ClusterTask,
    config: JobConfig,
    environ: Mapping[str, str],
    secret_file: Path | None = None,
) -> TaskConfig:
    """Returns a task of a cluster."""
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
    certs = None if config.network.certs is None else Path(config.network.certs)
    if certs is None and config.output.run_dir is not None:
        usual = local_directory(config.output.run_dir) / "certs"
        certs = usual if usual.is_dir() else None
    certificates = "" if certs is None else encryption().read(certs, f"{role}:{index}")
    if not loopback and not certificates and not config.network.allow_plaintext:
        raise ConfigurationError(
            "the tasks of this job are on several hosts, and this one has no certificate to "
            "encrypt what it sends. On one host: `trireme certs init DIR`, then `trireme certs "
            f"issue DIR --task {role}:{index}` and so on for every task. Copy each task its own "
            "file and DIR/job.secret, and start it with --certs DIR. Only if you trust everybody "
            "on the network between the hosts: --allow-plaintext"
        )
    if not loopback and not certificates:
        _log.warning(
            "WARNING: nothing between the hosts is encrypted (allow-plaintext, by the %s): "
            "everybody on the network between them can read and change it",
            config.origin("allow_plaintext"),
        )
    beside = certs.parent if certs is not None and certs.is_file() else certs
    secret = find_secret(secret_file, environ, loopback=loopback, certificates=beside)
    scheme = "tls" if certificates else config.scheme
    workers, servers = len(cluster.worker), len(cluster.ps)
    config = config.replaced("the hosts", workers=workers, ps=servers)
    config.check_together(servers)
    return TaskConfig(
        job=BY_HAND,
        role=cast(Role, role),
        index=index,
        workers=workers,
        servers=servers,
        coordinator=f"{scheme}://{cluster.coordinator_address}",
        listen="" if role == "worker" else f"{scheme}://{cluster.address(role, index)}",
        secret=secret,
        certificates=certificates,
        config=config,
        connect_timeout=config.timeouts.join_timeout,
        # Of other hosts it is not known which tasks share them.
        threads=threads_of_task(environ, workers + servers if loopback else 1),
    )

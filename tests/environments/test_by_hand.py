from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec
import pytest

from trireme.environments.by_hand import manual_task
from trireme.environments.cluster import ClusterSpec, ClusterTask
from trireme.environments.entry import LAUNCHERS
from trireme.errors import ConfigurationError
from trireme.launch.config.sources import read_config
from trireme.launch.config.task_config import TaskConfig


@dataclass(frozen=True)
class Flags:
    """The classic flags."""

    role: str = "ps"
    index: int = 0
    ps_hosts: str = "127.0.0.1:2222,localhost:2223"
    worker_hosts: str = "localhost:1,[::1]:2,127.0.0.2:3"
    coordinator: str | None = None
    secret_file: Path | None = None


LOCAL = Flags()
CORES = len(os.sched_getaffinity(0))


def mean(flags: Flags, home: Path, **given: str) -> TaskConfig:
    cluster = ClusterSpec.from_hosts(flags.ps_hosts, flags.worker_hosts, flags.coordinator)
    named = ClusterTask(flags.role, flags.index, cluster)
    config = read_config(given, {}, None)
    return manual_task(named, config, {"XDG_CONFIG_HOME": str(home)}, flags.secret_file)


def test_server_zero_hosts_the_coordinator(tmp_path: Path) -> None:
    task = mean(LOCAL, tmp_path)
    assert (task.listen, task.hosts_coordinator) == ("tcp://127.0.0.1:2222", True)
    assert task.threads == max(1, CORES // 5)
    assert (task.name, task.servers, task.workers) == ("ps:0", 2, 3)
    assert task.coordinator == "tcp://127.0.0.1:2222"
    assert len(bytes.fromhex(task.secret)) == 64


def test_other_tasks_find_the_coordinator_at_server_zero(tmp_path: Path) -> None:
    server = mean(replace(LOCAL, index=1), tmp_path)
    worker = mean(replace(LOCAL, role="worker", index=2), tmp_path, strategy="sync", aggregate="2")
    assert (server.listen, server.hosts_coordinator) == ("tcp://localhost:2223", False)
    assert (worker.listen, worker.hosts_coordinator) == ("", False)
    assert server.coordinator == worker.coordinator == "tcp://127.0.0.1:2222"
    assert server.secret == worker.secret
    assert server.job == worker.job
    assert (worker.config.training.strategy, worker.config.training.aggregate) == ("sync", 2)


def test_a_coordinator_of_its_own(tmp_path: Path) -> None:
    options = replace(LOCAL, coordinator="localhost:9")
    server = mean(options, tmp_path)
    coordinator = mean(replace(options, role="coordinator"), tmp_path)
    assert not server.hosts_coordinator
    assert coordinator.hosts_coordinator
    assert coordinator.listen == server.coordinator == "tcp://localhost:9"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (replace(LOCAL, ps_hosts=""), "needs a parameter server"),
        (replace(LOCAL, worker_hosts=""), "no worker"),
        (replace(LOCAL, index=2), "ps:0 to ps:1"),
        (replace(LOCAL, role="worker", index=3), "worker:0 to worker:2"),
        (replace(LOCAL, role="worker", index=-1), "worker:0 to worker:2"),
        (replace(LOCAL, role="coordinator"), "--coordinator host:port"),
        (replace(LOCAL, ps_hosts="10.0.0.1:2222"), r"certs issue DIR --task ps:0`.*--certs"),
        (replace(LOCAL, worker_hosts="node7:2222"), "Only if you trust everybody.*--allow-plain"),
    ],
)
def test_what_names_no_task_is_refused(tmp_path: Path, options: Flags, message: str) -> None:
    with pytest.raises(ConfigurationError, match=message):
        mean(options, tmp_path)


def test_tasks_of_several_hosts_count_only_themselves(tmp_path: Path) -> None:
    task = mean(replace(LOCAL, ps_hosts="node1:1", secret_file=secret(tmp_path)), tmp_path, **PLAIN)
    assert task.threads == CORES


# Between hosts -----------------------------------------------------------------------------------

PLAIN = {"allow_plaintext": "yes"}
FAR = replace(LOCAL, ps_hosts="node1:1", worker_hosts="node2:1,node3:1")


def secret(tmp_path: Path) -> Path:
    file = tmp_path / "secret"
    file.write_text("0123456789abcdef" * 2)
    file.chmod(0o600)
    return file


def test_plain_text_between_hosts_is_said_aloud(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    task = mean(replace(FAR, secret_file=secret(tmp_path)), tmp_path, **PLAIN)
    assert task.config.network.allow_plaintext and task.listen == "tcp://node1:1"
    assert "nothing between the hosts is encrypted (allow-plaintext, by the " in caplog.text
    caplog.clear()
    mean(LOCAL, tmp_path, **PLAIN)
    assert not caplog.text


def test_without_a_secret_between_hosts(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"no secret was given: .*--secret-file"):
        mean(FAR, tmp_path, **PLAIN)


SERVERS = "127.0.0.1:1,localhost:2223"
TORCHRUN = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "9"}


def test_a_program_names_its_servers_itself(tmp_path: Path) -> None:
    environ = {"XDG_CONFIG_HOME": str(tmp_path), "TRIREME_STRATEGY": "ssp"}
    task = LAUNCHERS.join(SERVERS, 2, 3, environ, tmp_path)
    other = mean(replace(LOCAL, role="worker", index=2, ps_hosts=SERVERS), tmp_path)
    assert task == msgspec.structs.replace(other, config=task.config)
    assert (task.config.training.strategy, task.config.tasks.workers, task.config.tasks.ps) == (
        "ssp",
        3,
        2,
    )


@pytest.mark.parametrize(
    ("servers", "worker", "workers", "environ", "message"),
    [
        ("a", 0, 1, {}, "the address of ps:0 is 'a': write host:port"),
        (SERVERS, 2, 2, {}, "worker:2 is outside the cluster"),
        (SERVERS, 0, 0, {}, "the cluster has no worker"),
        ("", 0, 1, {}, "needs a parameter server"),
        ("10.0.0.1:2222", 0, 1, {}, "this one has no certificate"),
        (SERVERS, 0, 1, {"TRIREME_TASK": "{}"}, "a task of a job already: start it by python"),
        (SERVERS, 0, 1, TORCHRUN, "a task of a job already"),
    ],
)
def test_servers_that_a_program_cannot_name(
    servers: str, worker: int, workers: int, environ: dict[str, str], message: str, tmp_path: Path
) -> None:
    environ = {"XDG_CONFIG_HOME": str(tmp_path), **environ}
    with pytest.raises(ConfigurationError, match=message):
        LAUNCHERS.join(servers, worker, workers, environ, tmp_path)

"""Whole jobs over TLS: by `trireme run --tls`, and by hand on two hosts with certificates."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from benchmarks.processes import free_ports
from tests.faults.hosts import Host, NoHosts, network
from tests.integration.shell import PROGRAMS, TRIREME, Running, Shell
from trireme.launch.run_directory import read_record

pytestmark = [pytest.mark.processes, pytest.mark.timeout(600)]

TRAIN = (PROGRAMS / "train.py", "--out", "out")


def secret_lines(files: Sequence[Path]) -> list[bytes]:
    """The secret, and the lines of the key, as they could appear anywhere."""
    lines = [line for file in files for line in file.read_bytes().split(b"\n") if len(line) > 40]
    key = [line for line in lines if not line.startswith((b"-----", b"MIIB"))]
    return key[:3]  # what follows is the certificates, which are not secret


def shown(shell: Shell, run: Path, but: Sequence[Path]) -> dict[str, bytes]:
    """What others may see of a job: its files, and its processes' command lines and variables."""
    seen = {}
    for directory, _, names in os.walk(run):  # a running job removes files beside this
        for file in (Path(directory, name) for name in names):
            with suppress(FileNotFoundError):
                if file.is_file() and file not in but:
                    seen[str(file)] = file.read_bytes()
    for process in shell.processes():
        environ = "\n".join(f"{key}={value}" for key, value in process.environ().items())
        seen[f"process {process.pid}"] = "\n".join([*process.cmdline(), environ]).encode()
    return seen


@pytest.mark.slow
def test_a_job_of_one_host_over_tls(shell: Shell) -> None:
    run = shell.directory / "run"
    job = shell.start(
        *("run", "--tls", "--transport", "tcp", "--ps", 2, "--workers", 2, "--run-dir", run),
        *(*TRAIN, "--max-steps", 10**9, "--every-steps", 20, "--pause", 0.01),
    )
    job.until(r"worker:1 \| step 30 ")
    record = read_record(run)
    assert record.coordinator.startswith("tls://127.0.0.1:")
    status = json.loads(shell.run("status", "--json", "run").out)
    assert {task["name"] for task in status["tasks"]} >= {"ps:0", "ps:1", "worker:0", "worker:1"}
    assert not plaintext(record.pids.values())
    private = [Path(record.secret_file), Path(record.certificate_file)]
    assert [file.stat().st_mode & 0o777 for file in private] == [0o600, 0o600]
    hidden = secret_lines(private)
    assert len(hidden) == 3
    seen = shown(shell, run, private)
    assert shell.run("stop", "run").status == 0
    ended = job.ended()
    assert ended.status == 130
    assert shell.run("report", "run").status == 0
    seen |= shown(shell, run, private) | {"output": ended.text.encode()}
    assert any("checkpoints" in name for name in seen) and any("report" in name for name in seen)
    for name, content in seen.items():
        assert not [line for line in hidden if line in content], name
        assert b"PRIVATE KEY" not in content, name
    assert not any(file.exists() for file in private)


def plaintext(pids: Iterable[int]) -> list[str]:
    """Which listeners of these processes answer a stranger by something else than TLS's alert."""
    found = []
    for pid in pids:
        for entry in psutil.Process(pid).net_connections("tcp"):
            if entry.status != psutil.CONN_LISTEN:
                continue
            with socket.create_connection(entry.laddr, 10.0) as stranger:
                stranger.sendall(b"TRIR" + bytes(60))
                if stranger.recv(100) != b"\x15\x03\x03\x00\x02\x02\x46":
                    found.append(f"{pid} at {entry.laddr}")
    return found


@pytest.mark.slow
@pytest.mark.thorough
def test_by_hand_on_two_hosts_with_certificates(shell: Shell) -> None:
    """`ps:0` on one, the workers on another; a third task comes with the certificate of another."""
    try:
        with network(["near", "far"]) as made:
            _by_hand(shell, *made.hosts)
    except NoHosts as error:
        pytest.skip(f"NO HOSTS, so nothing crossed a network: {error}")


def _by_hand(shell: Shell, near: Host, far: Host) -> None:
    port = free_ports(1)[0]
    hosts = (f"--ps_hosts={near.address}:{port}", f"--worker_hosts={far.address}:1,{far.address}:2")
    assert shell.run("certs", "init", "certs").status == 0
    issued = [f"--task={task}" for task in ("ps:0", "worker:0", "worker:1")]
    assert shell.run("certs", "issue", "certs", *issued).status == 0

    def task(host: Host, role: str, index: int, *words: object) -> Running:
        words = ("task", f"--job_name={role}", f"--task_index={index}", *hosts, *words)
        command = host.command(TRIREME)
        return shell.start(*words, command=command)

    train = (*TRAIN, "--max-steps", 40)
    bare = task(near, "ps", 0).ended()
    assert bare.status == 2
    assert "trireme certs issue DIR --task ps:0` and so on for every task" in bare.text
    server = task(near, "ps", 0, "--certs", "certs")
    server.until(rf"ps:0 listens on tls://{near.address}:{port}")
    plain = task(far, "worker", 1, "--allow-plaintext", "--secret-file=certs/job.secret", *train)
    other = task(far, "worker", 1, "--certs", "certs/worker-0.pem", *train)
    assert "WARNING: nothing between the hosts is encrypted" in plain.ended().text
    assert "speaks TLS only, and this task in plain text" in plain.ended().text
    assert "is for worker:0, and not for worker:1" in other.ended().text
    workers = [task(far, "worker", index, "--certs", "certs", *train) for index in (0, 1)]
    for worker in workers:
        assert worker.ended().status == 0, worker.ended().text
    assert server.ended().status == 0
    assert (shell.directory / "out" / "worker-0.safetensors").exists()

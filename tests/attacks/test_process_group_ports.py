"""Somebody on the network looks for the ports of processes that hold one model together.

They talk without a secret and without encryption. Here the host's name resolves to an address of
its network card, as on most machines, which is where torch's gloo listens by itself.
"""

from __future__ import annotations

import ipaddress
import shutil
import signal
import socket
import subprocess
import sys

import psutil
import pytest

from tests.integration.shell import PROGRAMS, TORCHRUN, TRIREME, Shell

pytestmark = [pytest.mark.processes, pytest.mark.timeout(240)]


def outward_address() -> str | None:
    """Returns an address of this host that other hosts can reach."""
    for entries in psutil.net_if_addrs().values():
        for entry in entries:
            if entry.family == socket.AF_INET and not entry.address.startswith("127."):
                return entry.address
    return None


ADDRESS = outward_address()
NAMED = ("unshare", "-u", "sh", "-c", f'hostname {ADDRESS} && exec "$@"', "sh")
"""Runs a command on a host whose name is an address: no resolver and no file has to know it."""


def can_be_named() -> bool:
    if ADDRESS is None or sys.platform != "linux" or shutil.which("unshare") is None:
        return False
    return subprocess.run([*NAMED, "true"], capture_output=True).returncode == 0


STARTERS = {
    "trireme run": (*TRIREME, "run", "--workers", "2", "--strategy", "allreduce"),
    "with servers": (*TRIREME, "run", "--ps", "1", "--workers", "1", "--mesh", "pp=2"),
    "torchrun": (*TORCHRUN, "--standalone", "--nproc-per-node", "2"),
}


@pytest.mark.thorough
@pytest.mark.slow(but=("with servers",))
@pytest.mark.skipif(not can_be_named(), reason="needs an address, and leave to name a host")
@pytest.mark.parametrize("starter", STARTERS)
def test_a_process_group_on_one_host_listens_on_loopback_alone(shell: Shell, starter: str) -> None:
    running = shell.start(
        *(PROGRAMS / "train.py", "--out", "out", "--max-steps", 10**9),
        command=[*NAMED, *STARTERS[starter]],
        environ={"TRIREME_RUN_DIR": "run"},
    )
    running.until(r"step 10 ")
    listening = {
        connection.laddr.ip
        for process in shell.processes()
        if "--standalone" not in process.cmdline()  # torchrun's own store is its own business
        for connection in process.net_connections(kind="inet")
        if connection.status == psutil.CONN_LISTEN
    }
    running.send(signal.SIGTERM)
    running.ended()
    assert listening
    assert all(ipaddress.ip_address(address).is_loopback for address in listening), listening

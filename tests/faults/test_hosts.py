"""Hosts of network namespaces: they have addresses and names, and can be cut off and slowed."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from tests.faults.hosts import Host, Network, NoHosts, network

pytestmark = pytest.mark.processes

# Answers on a connection whatever comes, until it is killed.
ECHO = """
import socket, sys, threading
server = socket.create_server((sys.argv[1], 5555))
print(socket.gethostname(), flush=True)
def echo(end):
    while data := end.recv(1 << 16):
        end.sendall(data)
while True:
    threading.Thread(target=echo, args=(server.accept()[0],), daemon=True).start()
"""
# Prints whether the whole answer comes, and when.
ASK = """
import socket, sys, time
began = time.monotonic()
size = int(sys.argv[2])
try:
    with socket.create_connection((sys.argv[1], 5555), timeout=float(sys.argv[3])) as end:
        end.sendall(bytes(size))
        left = size
        while left and (data := end.recv(1 << 16)):
            left -= len(data)
    print(f"answered {time.monotonic() - began:.3f}")
except OSError:
    print("silent")
"""


@pytest.fixture(scope="module")
def hosts() -> Iterator[Network]:
    """Two hosts, each with a server that echoes."""
    servers = []
    try:
        with network(["north", "south"]) as made:
            try:
                for host in made.hosts:
                    command = host.command([sys.executable, "-c", ECHO, host.address])
                    servers.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
                names = [each.stdout.readline().strip() for each in servers if each.stdout]
                assert names == ["north", "south"]
                yield made
            finally:
                for server in servers:
                    server.kill()
                    server.communicate()
    except NoHosts as error:
        pytest.skip(f"NO HOSTS ARE TESTED: {error}")


def ask(asker: Host | None, address: str, size: int = 1, seconds: float = 0.7) -> str:
    words = [sys.executable, "-c", ASK, address, str(size), str(seconds)]
    command = words if asker is None else asker.command(words)
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    return ended.stdout.split()[0]


def test_hosts_reach_each_other_and_this_process_reaches_them(hosts: Network) -> None:
    north, south = hosts.hosts
    assert ask(north, south.address) == "answered"
    assert ask(south, north.address) == "answered"
    assert ask(None, north.address) == "answered"


def test_loopback_is_each_hosts_own(hosts: Network) -> None:
    assert ask(hosts.hosts[0], "127.0.0.1") == "silent"  # as its server has another address


@pytest.mark.parametrize("how", ["cut", "mute", "deafen"])
def test_a_host_is_cut_off_and_heals(hosts: Network, how: str) -> None:
    north, south = hosts.hosts
    getattr(hosts, how)(north)
    try:
        assert ask(south, north.address) == "silent"
        assert ask(None, north.address) == "silent"
        assert ask(None, south.address) == "answered"
    finally:
        hosts.heal(north)
    assert ask(south, north.address) == "answered"
    assert ask(None, north.address) == "answered"


def test_a_slow_cable(hosts: Network) -> None:
    north, south = hosts.hosts
    hosts.slow(north, 100_000)
    try:
        began = time.monotonic()
        assert ask(south, north.address, size=300_000, seconds=20.0) == "answered"
        assert time.monotonic() - began > 1.0
    finally:
        hosts.heal(north)


def test_nothing_is_left() -> None:
    try:
        with network(["alone"]) as made:
            pass
    except NoHosts as error:
        pytest.skip(f"NO HOSTS ARE TESTED: {error}")
    for words in (("ip", "netns", "list"), ("ip", "link")):
        listed = subprocess.run(words, capture_output=True, text=True, check=True).stdout
        assert made.bridge not in listed

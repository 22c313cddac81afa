from __future__ import annotations

import pytest

from tests.clocks import VirtualClock
from tests.wire.serving import CATALOG, JOB, EchoHandler, Running, ask, running
from trireme.errors import AuthenticationError, ConnectionBroken, PeerClosed
from trireme.wire.connection import Connection
from trireme.wire.handshake import Identity, authenticate
from trireme.wire.refusals import BURST, LINE_SECONDS, Refusals, RefusedHosts, ServiceLimits
from trireme.wire.transport import Listener, Stream, listen


def test_all_are_counted_and_few_are_said(caplog: pytest.LogCaptureFixture) -> None:
    refusals = Refusals()
    for number in range(100_000):
        refusals.log(number * 1e-4, f"denied number {number}")  # ten seconds of it
        refusals.tick(number * 1e-4)
    assert refusals.count == 100_000
    ours = [each for each in caplog.records if each.name == "trireme.wire.refusals"]
    said = [record.getMessage() for record in ours]  # threads of earlier tests may speak
    assert said[:BURST] == [f"denied number {number}" for number in range(BURST)]
    assert len(said) <= BURST + 1
    refusals.tick(2 * LINE_SECONDS)
    total = sum(int(line.split()[0]) for line in caplog.messages if "more connections" in line)
    assert total + sum(line.startswith("denied") for line in caplog.messages) == 100_000


def test_after_a_quiet_time_each_is_said_again(caplog: pytest.LogCaptureFixture) -> None:
    refusals = Refusals()
    for number in range(BURST):
        refusals.log(0.0, f"denied number {number}")
    refusals.log(0.0, "denied without a word")
    refusals.tick(BURST * LINE_SECONDS)
    refusals.log(BURST * LINE_SECONDS, "denied once more")
    assert "denied without a word" not in caplog.text
    assert "1 more connections were refused, 21 in all" in caplog.text
    assert caplog.messages[-1] == "denied once more"


def test_strangers_do_not_fill_the_log(caplog: pytest.LogCaptureFixture) -> None:
    with running(EchoHandler()) as run:
        good = run.client()
        for _ in range(3 * BURST):
            stranger = run.stranger()
            stranger.write([b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"])
            stranger.close()
            ask(good, "still served")
        run.turn()
        good.close()
    assert run.service.refusals.count >= 3 * BURST
    assert len([line for line in caplog.messages if "a stranger" in line]) <= BURST + 1


# Hosts -------------------------------------------------------------------------------------------

STRANGER = "tcp://192.0.2.7:4711"


def test_a_host_that_is_refused_too_often_is_not_listened_to_for_a_while() -> None:
    hosts = RefusedHosts(tries=3, seconds=2.0)
    for _ in range(3):
        assert hosts.admits(10.0, STRANGER)
        hosts.refused(10.0, STRANGER)
    assert not hosts.admits(10.0, STRANGER)
    assert not hosts.admits(10.0, "tls://192.0.2.7:99")  # the port does not matter
    assert hosts.admits(10.0, "tcp://192.0.2.8:4711")
    assert not hosts.admits(11.9, STRANGER)
    assert hosts.admits(12.0, STRANGER)
    hosts.refused(12.0, STRANGER)
    assert not hosts.admits(12.0, STRANGER)
    assert hosts.admits(1000.0, STRANGER)


def test_one_owner_of_many_addresses_is_one_host() -> None:
    hosts = RefusedHosts(tries=2, seconds=1.0)
    for number in range(2):
        hosts.refused(0.0, f"tls://[2001:db8::{number}]:1")
    assert not hosts.admits(0.0, "tls://[2001:db8::77]:1")
    assert hosts.admits(0.0, "tls://[2001:db8:0:1::77]:1")
    for _ in range(2):
        hosts.refused(0.0, "tls://[::ffff:192.0.2.7]:1")
    assert not hosts.admits(0.0, STRANGER)


def test_this_host_is_always_listened_to() -> None:
    hosts = RefusedHosts(tries=1, seconds=1.0)
    for peer in ("tcp://127.0.0.1:1", "tls://[::1]:1", "shm://trireme-x#client", "memory://x"):
        for _ in range(5):
            hosts.refused(0.0, peer)
        assert hosts.admits(0.0, peer)


def test_what_is_remembered_of_hosts_is_bounded() -> None:
    hosts = RefusedHosts(tries=1, seconds=1e6)
    for number in range(5000):
        hosts.refused(0.0, f"tcp://10.0.{number >> 8}.{number & 255}:1")
    assert len(hosts._hosts) <= 1024
    assert not hosts.admits(0.0, "tcp://10.0.19.135:1")  # the last one


class Renamed(Listener):
    """A listener whose peers come from a host of the test's choice."""

    def __init__(self, inner: Listener) -> None:
        self.inner, self.address, self.host = inner, inner.address, "192.0.2.7"

    def fileno(self) -> int:
        return self.inner.fileno()

    def accept(self) -> Stream | None:
        stream = self.inner.accept()
        if stream is not None:
            stream.peer = f"tcp://{self.host}:{stream.peer.rpartition(':')[2]}"
        return stream

    def close(self) -> None:
        self.inner.close()


def refuse(run: Running, times: int) -> None:
    """Has connections denied, one after the other."""
    for _ in range(times):
        connection = Connection(run.stranger(), CATALOG)
        with pytest.raises(AuthenticationError, match="secret"):
            authenticate(connection, Identity(JOB, "worker:1"), b"wrong", server="ps:0")


def test_a_service_does_not_listen_to_a_host_that_was_refused_too_often() -> None:
    listener, clock = Renamed(listen("tcp://127.0.0.1:0")), VirtualClock()
    limits = ServiceLimits(tries=3, try_seconds=5.0)
    with running(EchoHandler(), listener=listener, clock=clock, limits=limits) as run:
        refuse(run, 3)
        with pytest.raises((PeerClosed, ConnectionBroken)):
            run.client()  # who knows the secret is turned away too
        listener.host = "192.0.2.8"
        run.client().close()
        listener.host = "192.0.2.7"
        clock.advance(5.0)
        good = run.client()
        refuse(run, 2)
        run.client("worker:2").close()  # a task of the job is on that host
        ask(good, "still served")
        good.close()


def test_a_service_has_so_many_connections_and_no_more() -> None:
    with running(EchoHandler(), limits=ServiceLimits(connections=3)) as run:
        good = [run.client(f"worker:{index}") for index in range(3)]
        with pytest.raises((PeerClosed, ConnectionBroken)):
            run.client("worker:3")
        for client in good:
            ask(client, "still served")
        good[0].close()
        run.turn()
        run.client("worker:3").close()
        for client in good[1:]:
            client.close()

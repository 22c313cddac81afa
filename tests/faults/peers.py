"""What bad peers cost good ones: half open connections, strangers by the hundred, no descriptors.

    python -m tests.faults.peers       prints the figures of docs/faults.md, over tcp and over tls

The tests beside this module demand bounds of the same figures.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from unittest import mock

import psutil

from tests.certificates import authority, certificates
from tests.faults.limits import no_descriptors
from tests.faults.proxy import Proxy, unnoticed
from tests.wire.serving import CATALOG, JOB, SECRET, ask
from trireme.cluster.coordinator import Coordinator
from trireme.cluster.member import Member
from trireme.cluster.member_protocol import MemberConfig
from trireme.cluster.state import Policy
from trireme.errors import WireError
from trireme.wire.connection import Connection
from trireme.wire.handshake import Identity, authenticate
from trireme.wire.refusals import ServiceLimits
from trireme.wire.service import Service
from trireme.wire.transport import Stream, connect, listen

SCHEMES = ("tcp", "tls")
PATIENCE = 20.0
STRANGERS = 200


# A connection of which half is open --------------------------------------------------------------


def half_open(scheme: str, way: str, timeout: float) -> float:
    """Returns after how many seconds a connection is given up that loses one direction.

    Args:
        scheme: `tcp` or `tls`.
        way: `up` where the coordinator hears the member no more; `down` the other way round.
        timeout: the silence after which either gives the other up.

    Raises:
        AssertionError: it is not given up, or its socket is not closed.
    """
    policy = Policy(1, 0, heartbeat_timeout=timeout, heartbeat_interval=timeout / 5)
    coordinator = Coordinator(policy)
    own = certificates("ps:0") if scheme == "tls" else None
    listener = listen(f"{scheme}://127.0.0.1:0", certificates=own)
    epoch = coordinator.state.epoch
    serves = ("coordinator:0",)
    service = Service(
        listener,
        [coordinator],
        job=JOB,
        secret=SECRET,
        epoch=epoch,
        serves=serves,
        limits=ServiceLimits(tick_seconds=0.01),
    )
    thread = threading.Thread(target=service.run, daemon=True)
    thread.start()
    proxy = Proxy(service.address)
    mine = certificates("worker:0") if scheme == "tls" else None
    config = MemberConfig(proxy.address, JOB, "worker", 0, SECRET, certificates=mine)
    try:
        with (
            mock.patch("trireme.cluster.member.connect", unnoticed),
            closing(Member(config)) as member,
        ):
            member.join(PATIENCE)
            before = proxy.connections
            getattr(proxy, way).lossy = True
            began = time.monotonic()
            if way == "up":
                _until(lambda: coordinator.state.tasks["worker:0"].state == "lost")
                _until(lambda: not any(link.authenticated for link in service._links))
            else:
                _until(lambda: proxy.connections > before)
            return time.monotonic() - began
    finally:
        proxy.close()
        service.stop()
        thread.join(PATIENCE)


def _until(condition: object) -> None:
    assert callable(condition)
    deadline = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < deadline, "it is not noticed"
        time.sleep(0.005)


# A service in a process of its own ---------------------------------------------------------------

_SERVE = """
import sys
from tests.wire.serving import JOB, SECRET, EchoHandler
from trireme.certificates import Certificates
from trireme.wire.service import Service
from trireme.wire.transport import listen
pem = sys.stdin.read()
own = Certificates(pem) if pem else None
listener = listen(f"{'tls' if pem else 'tcp'}://127.0.0.1:0", certificates=own)
service = Service(listener, [EchoHandler()], job=JOB, secret=SECRET)
print(listener.address, flush=True)
service.run()
"""


class Served:
    """A service that sends back what comes, in a process of its own.

    Attributes:
        address: where it listens.
        pid: of its process.
    """

    def __init__(self, address: str, pid: int) -> None:
        self.address = address
        self.pid = pid

    def client(self) -> Connection:
        """Comes as a worker."""
        own = certificates("worker:0") if self.address.startswith("tls") else None
        stream = connect(self.address, timeout=PATIENCE, certificates=own)
        connection = Connection(stream, CATALOG)
        try:
            identity = Identity(JOB, "worker:0")
            authenticate(connection, identity, SECRET, server="ps:0", timeout=PATIENCE)
        except BaseException:
            connection.close()
            raise
        return connection

    def stranger(self) -> Stream:
        """Comes, and says nothing yet."""
        return connect(self.address.replace("tls", "tcp"), timeout=PATIENCE)


@contextmanager
def served(scheme: str) -> Iterator[Served]:
    """Runs a service in a process of its own while the block runs."""
    pem = authority().issue("ps:0") if scheme == "tls" else ""
    child = subprocess.Popen(
        [sys.executable, "-c", _SERVE], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert child.stdin is not None and child.stdout is not None
        child.stdin.write(pem)
        child.stdin.close()
        address = child.stdout.readline().strip()
        assert address, "the service did not start"
        yield Served(address, child.pid)
        assert child.poll() is None, "the service has ended"
    finally:
        child.kill()
        child.wait(PATIENCE)


# Strangers ---------------------------------------------------------------------------------------


def waits(service: Served, count: int) -> list[float]:
    """Returns how many seconds each of so many clients takes to come in and be answered.

    One that is crowded out before it has authenticated comes again, as every task does.
    """
    found = []
    for _ in range(count):
        began = time.monotonic()
        while True:
            with suppress(WireError), service.client() as client:
                ask(client, "served")
                break
            assert time.monotonic() < began + PATIENCE, "nobody gets in"
        found.append(time.monotonic() - began)
    return found


@contextmanager
def strangers(service: Served, count: int) -> Iterator[None]:
    """Has strangers come, and come again, each of which says a byte now and then."""
    ended = threading.Event()

    def come() -> None:
        there: list[Stream] = []
        while not ended.wait(0.02):
            while len(there) < count and not ended.is_set():
                with suppress(WireError):
                    there.append(service.stranger())
            there = [each for each in there if _says_a_byte(each)]
        for each in there:
            each.close()

    thread = threading.Thread(target=come, daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join(PATIENCE)


def _says_a_byte(stranger: Stream) -> bool:
    """Returns whether it is still listened to."""
    try:
        stranger.write([b"T"])
        return stranger.read_into([memoryview(bytearray(64))]) >= 0
    except WireError:
        stranger.close()
        return False


def percentile(values: Sequence[float], percent: int) -> float:
    """Returns a percentile of some values."""
    return statistics.quantiles(values, n=100, method="inclusive")[percent - 1]


# Descriptors -------------------------------------------------------------------------------------


def without_descriptors(scheme: str, seconds: float) -> tuple[int, float]:
    """Takes the descriptors of a service away while strangers wait at its door.

    Args:
        scheme: `tcp` or `tls`.
        seconds: for how long.

    Returns:
        How many requests of a client were answered meanwhile, and the share of a core that the
        service used when nobody asked.

    Raises:
        AssertionError: the service ends, or does not let anybody in afterwards.
    """
    with served(scheme) as service, ExitStack() as stack:
        client, process = stack.enter_context(service.client()), psutil.Process(service.pid)
        with no_descriptors(service.pid):
            for _ in range(20):
                stack.callback(service.stranger().close)
            used, began = process.cpu_times(), time.monotonic()
            time.sleep(seconds)
            now, passed = process.cpu_times(), time.monotonic() - began
            answered = 0
            while time.monotonic() < began + 2 * seconds:
                ask(client, "still served")
                answered += 1
        with service.client() as late:
            ask(late, "let in")
        return answered, (now.user + now.system - used.user - used.system) / passed


def main() -> None:
    for scheme in SCHEMES:
        for way, deaf in (("up", "coordinator"), ("down", "task")):
            seconds = half_open(scheme, way, 2.0)
            print(
                f"{scheme}: half open, the {deaf} hears nothing: given up after {seconds:.2f} s "
                "of 2"
            )
        with served(scheme) as service:
            alone = waits(service, 200)
            with strangers(service, STRANGERS):
                among = waits(service, 200)
        for name, found in (("alone", alone), (f"among {STRANGERS} strangers", among)):
            print(
                f"{scheme}: to come in and be answered, {name}: median "
                f"{1000 * statistics.median(found):.1f} ms, 99% {1000 * percentile(found, 99):.1f}"
                f" ms, worst {1000 * max(found):.1f} ms"
            )
        answered, used = without_descriptors(scheme, 2.0)
        print(
            f"{scheme}: no descriptors for 4 s: {answered} requests answered in 2 s, "
            f"{100 * used:.1f}% of a core in the other 2 s"
        )


if __name__ == "__main__":
    main()

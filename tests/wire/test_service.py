from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import ClassVar

import pytest

from tests.clocks import VirtualClock
from tests.conformance import PATIENCE, pattern, read_until_end, wait_readable, write_all
from tests.wire.serving import (
    CATALOG,
    JOB,
    SECRET,
    Echo,
    EchoHandler,
    Running,
    ask,
    nothing_more,
    running,
)
from trireme.errors import (
    AuthenticationError,
    ConnectionBroken,
    ConnectionRefused,
    FrameError,
    PeerClosed,
    WireError,
)
from trireme.wire import refusals, service
from trireme.wire.connection import Connection, Incoming
from trireme.wire.handshake import (
    HANDSHAKE_CATALOG,
    Challenge,
    Denied,
    Hello,
    Identity,
    authenticate,
)
from trireme.wire.message import Limits, Message
from trireme.wire.refusals import ServiceLimits
from trireme.wire.service import Link, Service
from trireme.wire.transport import listen


class Shout(Message, frozen=True, array_like=True):
    kind: ClassVar[int] = 211


class ShoutHandler(EchoHandler):
    messages = (Shout,)


@contextmanager
def held(run: Running) -> Iterator[None]:
    """The loop stands still during the block."""
    holding, go_on = threading.Event(), threading.Event()

    def hold() -> None:
        holding.set()
        assert go_on.wait(PATIENCE)

    run.turn()  # whatever it was woken for before is done
    run.service.call_soon(hold)
    assert holding.wait(PATIENCE)
    yield
    go_on.set()


@pytest.mark.parametrize("address", ["tcp://127.0.0.1:0", "memory://"])
def test_it_serves(address: str) -> None:
    handler = EchoHandler()
    with running(handler, address=address) as run, run.client("worker:7") as client:
        ask(client, "hello", pattern(300_000))
        ask(client, "again")
        link = handler.links.get(timeout=PATIENCE)
        assert link.identity == Identity(JOB, "worker:7")
        assert link.connection.peer in repr(link) and "worker:7" in repr(link)
        client.close()
        gone, error = handler.closings.get(timeout=PATIENCE)
        assert gone is link
        assert link.closed
        assert isinstance(error, PeerClosed)
    assert nothing_more(handler)


def test_many_clients_are_served_at_once() -> None:
    with running(EchoHandler()) as run:
        clients = [run.client(f"worker:{i}") for i in range(20)]
        for number, client in enumerate(clients):
            client.send(Echo(str(number)), [pattern(50_000, number)], timeout=PATIENCE)
        for number, client in reversed(list(enumerate(clients))):
            incoming = client.receive(timeout=PATIENCE)
            assert incoming.message == Echo(str(number))
            assert b"".join(incoming.payload) == pattern(50_000, number)
            client.close()


def test_messages_sent_in_a_heap_are_all_served() -> None:
    # No tick comes to its help.
    with (
        running(EchoHandler(), limits=ServiceLimits(tick_seconds=3600.0)) as run,
        run.client() as client,
    ):
        for number in range(500):
            client.offer(Echo(str(number)), sequence=number)
        for number in range(500):
            assert client.receive(timeout=PATIENCE).sequence == number


def test_messages_that_came_in_one_read_need_no_event() -> None:
    with running(
        EchoHandler(), address="memory://", limits=ServiceLimits(tick_seconds=3600.0)
    ) as run:
        client = run.client()
        with held(run):
            for number in range(33):  # one more than are handled in a turn
                client.send(Echo(), sequence=number, timeout=PATIENCE)
            assert client.bytes_sent < 1300  # they fit into what is read at once
        for number in range(33):
            assert client.receive(timeout=PATIENCE).sequence == number
        client.close()


def test_a_large_reply_to_a_slow_reader() -> None:
    with running(EchoHandler()) as run, run.client() as client, run.client() as other:
        client.send(Echo("large"), [pattern(24 << 20)], timeout=PATIENCE)
        ask(other, "meanwhile")
        incoming = client.receive(timeout=PATIENCE)
        assert b"".join(incoming.payload) == pattern(24 << 20)
        ask(client, "after")


def test_the_kind_picks_the_handler() -> None:
    echo, shout = EchoHandler(), ShoutHandler()
    with running(echo, shout) as run, run.client() as client:
        client.catalog = run.service.catalog
        client.send(Shout(), timeout=PATIENCE)
        assert client.receive(timeout=PATIENCE).message == Shout()
        ask(client, "hello")
        # Each is told of every link.
        assert echo.links.get(timeout=PATIENCE) is shout.links.get(timeout=PATIENCE)
        client.close()
        assert echo.closings.get(timeout=PATIENCE)[0] is shout.closings.get(timeout=PATIENCE)[0]


def test_two_handlers_of_one_kind() -> None:
    listener = listen("memory://")
    with pytest.raises(ValueError, match="kind 210 of Echo is not free"):
        Service(listener, [EchoHandler(), EchoHandler()], job=JOB, secret=SECRET)
    listener.close()


def test_payloads_go_where_the_handler_says() -> None:
    memory = bytearray(1000)

    class InPlace(EchoHandler):
        def authenticated(self, link: Link) -> None:
            assert link.connection.destination is None
            link.connection.destination = lambda message, length: [memoryview(memory)[:length]]

    with running(InPlace()) as run, run.client() as client:
        ask(client, "in place", pattern(1000))
        assert memory == pattern(1000)


def test_a_context_of_the_handlers_own() -> None:
    class Counting(EchoHandler):
        def authenticated(self, link: Link) -> None:
            assert link.context is None
            link.context = 0

        def received(self, link: Link, incoming: Incoming) -> None:
            link.context += 1
            link.offer(Echo(str(link.context)))

    with running(Counting()) as run, run.client() as client, run.client() as other:
        for link, expected in ((client, "1"), (client, "2"), (other, "1")):
            link.send(Echo(), timeout=PATIENCE)
            assert link.receive(timeout=PATIENCE).message == Echo(expected)


# Peers that misbehave --------------------------------------------------------------------------


def test_a_wrong_secret_is_denied(caplog: pytest.LogCaptureFixture) -> None:
    handler = EchoHandler()
    with running(handler) as run, run.client() as good:
        stranger = Connection(run.stranger(), CATALOG)
        with pytest.raises(AuthenticationError, match="secret"):
            authenticate(
                stranger, Identity(JOB, "worker:1"), b"wrong", server="ps:0", timeout=PATIENCE
            )
        ask(good, "good")
        assert handler.links.get(timeout=PATIENCE).identity.task == "worker:0"
        assert handler.links.empty()
    assert "worker:1 does not know this job's secret" in caplog.text


def test_a_stranger_may_not_speak_to_the_handlers() -> None:
    handler = EchoHandler()
    with running(handler) as run, run.client() as good:
        stranger = Connection(run.stranger(), CATALOG)
        stranger.send(Echo("let me in"), timeout=PATIENCE)
        with pytest.raises((PeerClosed, ConnectionBroken)):
            stranger.receive(timeout=PATIENCE)
        ask(good, "good")
        assert nothing_more(handler)


def test_a_hello_that_is_too_large(caplog: pytest.LogCaptureFixture) -> None:
    with running(EchoHandler()) as run, run.client() as good:
        stranger = Connection(run.stranger(), HANDSHAKE_CATALOG)
        stranger.send(Hello(JOB, "", "x" * 2000, 0, bytes(32)), timeout=PATIENCE)
        with pytest.raises((PeerClosed, ConnectionBroken)):
            stranger.receive(timeout=PATIENCE)
        ask(good, "good")
    assert "at most 1024 are accepted" in caplog.text


def test_a_stranger_that_stalls_is_closed_at_its_deadline(caplog: pytest.LogCaptureFixture) -> None:
    clock = VirtualClock()
    with running(EchoHandler(), clock=clock) as run, run.client() as good:
        stranger = Connection(run.stranger(), HANDSHAKE_CATALOG)
        stranger.send(Hello(JOB, "", "worker:1", 0, bytes(32)), timeout=PATIENCE)
        assert isinstance(stranger.receive(timeout=PATIENCE).message, Challenge)
        clock.advance(9.9)
        run.turn()
        assert stranger.poll() is None
        clock.advance(0.2)
        run.turn()
        with pytest.raises(PeerClosed):
            stranger.receive(timeout=PATIENCE)
        clock.advance(100.0)  # an authenticated peer may be silent
        run.turn()
        ask(good, "good")
    assert "did not authenticate within 10 s" in caplog.text


def test_too_many_strangers(caplog: pytest.LogCaptureFixture) -> None:
    with (
        running(EchoHandler(), limits=ServiceLimits(unauthenticated=3)) as run,
        run.client() as good,
    ):
        strangers = [run.stranger() for _ in range(4)]
        # The one that came first has to go.
        assert read_until_end(strangers[0]) == b""
        for stranger in strangers[1:]:
            connection = Connection(stranger, CATALOG)
            authenticate(
                connection, Identity(JOB, "worker:1"), SECRET, server="ps:0", timeout=PATIENCE
            )
            ask(connection, "known")
        ask(good, "good")
    assert "3 connections are unauthenticated" in caplog.text


def test_who_is_refused_too_often_costs_no_look_at_all_connections(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Refusing must be cheap. Here all are on one host, or strangers are on another."""
    parsed: list[str] = []
    strangers_host = ["192.0.2.7"]

    def parse(peer: str) -> str:
        parsed.append(peer)
        return strangers_host[0]

    for module in (refusals, service):
        monkeypatch.setattr(module, "network", parse)
    limits = ServiceLimits(tries=1, try_seconds=1e9)
    with running(EchoHandler(), limits=limits) as run:
        tasks = [run.client(f"worker:{index}") for index in range(8)]
        for task in tasks:
            ask(task, "it is known by now")
        strangers_host[0] = "192.0.2.8"
        bad = run.stranger()
        write_all(bad, bytes(100))
        assert read_until_end(bad) == b""
        parsed.clear()
        for _ in range(5):
            assert read_until_end(run.stranger()) == b"", "it was refused too often"
        assert len(parsed) <= 1 + 2 * 5, "for its tries and for the hosts of tasks, not for each"
        strangers_host[0] = "192.0.2.7"
        run.client("worker:9").close()
        for task in tasks:
            task.close()
    assert "it was refused too often" in caplog.text


def test_a_known_peer_that_sends_nonsense(caplog: pytest.LogCaptureFixture) -> None:
    handler = EchoHandler()
    with running(handler) as run, run.client() as good:
        bad = run.client("worker:1")
        write_all(bad.stream, bytes(100))
        _, error = handler.closings.get(timeout=PATIENCE)
        assert isinstance(error, FrameError)
        with pytest.raises((PeerClosed, ConnectionBroken)):
            bad.receive(timeout=PATIENCE)
        ask(good, "good")
    assert "closed the connection of worker:1 at" in caplog.text


@pytest.mark.parametrize("departing", [False, True])
def test_a_peer_that_has_said_that_it_goes_may_break_off(
    departing: bool, caplog: pytest.LogCaptureFixture
) -> None:
    class Parting(EchoHandler):
        def received(self, link: Link, incoming: Incoming) -> None:
            link.departing = departing
            super().received(link, incoming)

    handler = Parting()
    with running(handler) as run:
        client = run.client("worker:1")
        client.send(Echo("bye"), timeout=PATIENCE)
        wait_readable(client)
        client.close()  # with an answer that was not read: the other side sees a reset
        _, error = handler.closings.get(timeout=PATIENCE)
        assert isinstance(error, ConnectionBroken)
    assert ("closed the connection of worker:1" in caplog.text) is not departing


def test_a_known_peer_that_sends_too_much() -> None:
    handler = EchoHandler()
    with (
        running(handler, limits=ServiceLimits(frame=Limits(payload=1000))) as run,
        run.client() as client,
    ):
        ask(client, "fits", bytes(1000))
        client.send(Echo(), [bytes(1001)], timeout=PATIENCE)
        _, error = handler.closings.get(timeout=PATIENCE)
        assert isinstance(error, FrameError)


def test_a_handler_may_refuse_a_message() -> None:
    class Strict(EchoHandler):
        def received(self, link: Link, incoming: Incoming) -> None:
            if incoming.message == Echo("rude"):
                raise FrameError("that is rude")
            super().received(link, incoming)

    handler = Strict()
    with running(handler) as run, run.client() as good, run.client() as bad:
        bad.send(Echo("rude"), timeout=PATIENCE)
        _, error = handler.closings.get(timeout=PATIENCE)
        assert isinstance(error, FrameError) and "rude" in str(error)
        with pytest.raises((PeerClosed, ConnectionBroken)):
            bad.receive(timeout=PATIENCE)
        ask(good, "good")


def test_a_peer_that_does_not_read_is_closed() -> None:
    handler = EchoHandler()
    with running(handler, limits=ServiceLimits(unsent_bytes=1 << 20)) as run, run.client() as good:
        bad = run.client("worker:1")
        # The first reply may be of any size; it stays unsent, and the second is too much.
        bad.send(Echo(), [bytes(24 << 20)], timeout=PATIENCE)
        bad.send(Echo(), timeout=PATIENCE)
        link, error = handler.closings.get(timeout=PATIENCE)
        assert link.identity.task == "worker:1"
        assert isinstance(error, ConnectionBroken) and "does not read" in str(error)
        ask(good, "good")


def test_a_peer_of_whom_a_handler_waits_for_confirmations_may_read_late() -> None:
    class Windowed(EchoHandler):
        def received(self, link: Link, incoming: Incoming) -> None:
            link.windowed = True
            super().received(link, incoming)

    limits = ServiceLimits(unsent_bytes=1 << 20)
    with running(Windowed(), limits=limits) as run, run.client() as late:
        late.send(Echo(), [bytes(24 << 20)], timeout=PATIENCE)
        late.send(Echo("then"), timeout=PATIENCE)
        assert late.receive(timeout=PATIENCE).message == Echo()
        assert late.receive(timeout=PATIENCE).message == Echo("then")


def test_what_a_peer_said_before_it_went_away_is_heard() -> None:
    heard = threading.Event()
    may_answer = threading.Event()

    class Slow(EchoHandler):
        def received(self, link: Link, incoming: Incoming) -> None:
            if incoming.message == Echo("answer"):
                assert may_answer.wait(PATIENCE)
                for _ in range(3):
                    link.offer(Echo(), [bytes(1 << 20)])
            else:
                assert incoming.message == Echo("farewell")
                heard.set()

    handler = Slow()
    with running(handler) as run:
        client = run.client()
        client.send(Echo("answer"), timeout=PATIENCE)
        client.send(Echo("farewell"), timeout=PATIENCE)
        client.close()
        may_answer.set()
        assert heard.wait(PATIENCE)
        link, error = handler.closings.get(timeout=PATIENCE)
        assert isinstance(error, PeerClosed | ConnectionBroken)
        assert not link.offer(Echo())


def test_one_peer_cannot_keep_the_service_to_itself() -> None:
    """A flood of small messages in one read gives others their turn between."""
    order: list[str] = []

    class Noting(EchoHandler):
        def received(self, link: Link, incoming: Incoming) -> None:
            order.append(link.identity.task)
            super().received(link, incoming)

    with (
        running(Noting(), address="memory://") as run,
        run.client("worker:0") as flood,
        run.client("worker:1") as other,
    ):
        with held(run):
            for _ in range(200):
                flood.send(Echo(), timeout=PATIENCE)
            other.send(Echo(), timeout=PATIENCE)
        other.receive(timeout=PATIENCE)
        for _ in range(200):
            flood.receive(timeout=PATIENCE)
    assert order.index("worker:1") < 150


# Links -----------------------------------------------------------------------------------------


def test_a_link_that_is_closed_sends_what_was_offered_before() -> None:
    closing = threading.Event()

    class Dismissive(EchoHandler):
        def received(self, link: Link, incoming: Incoming) -> None:
            link.offer(Echo("go"), [pattern(24 << 20)])
            assert link.connection.unsent > 0
            link.close()
            link.close()
            assert link.closed
            assert not link.offer(Echo("dropped"))
            closing.set()

    handler = Dismissive()
    with running(handler) as run, run.client() as client:
        client.send(Echo(), timeout=PATIENCE)
        # Who reads at once may empty the socket as fast as it is filled: nothing is unsent then.
        assert closing.wait(PATIENCE)
        incoming = client.receive(timeout=PATIENCE)
        assert incoming.message == Echo("go")
        assert b"".join(incoming.payload) == pattern(24 << 20)
        with pytest.raises((PeerClosed, ConnectionBroken)):
            client.receive(timeout=PATIENCE)
        assert handler.closings.get(timeout=PATIENCE)[1] is None
    assert nothing_more(handler)


def test_a_closing_link_does_not_wait_for_ever() -> None:
    class Dismissive(EchoHandler):
        def received(self, link: Link, incoming: Incoming) -> None:
            link.offer(Echo("go"), [bytes(24 << 20)])
            link.close()

    handler, clock = Dismissive(), VirtualClock()
    with running(handler, clock=clock) as run, run.client() as client:
        client.send(Echo(), timeout=PATIENCE)
        wait_readable(client.stream)
        run.turn()
        assert nothing_more(handler)
        clock.advance(2.1)
        run.turn()
        assert handler.closings.get_nowait()[1] is None


def test_offering_what_no_handler_has() -> None:
    errors: list[ValueError] = []

    class Confused(EchoHandler):
        def received(self, link: Link, incoming: Incoming) -> None:
            try:
                link.offer(Shout())
            except ValueError as error:
                errors.append(error)
            super().received(link, incoming)

    with running(Confused()) as run, run.client() as client:
        ask(client, "still good")
    assert "Shout is not part" in str(errors[0])


# The loop --------------------------------------------------------------------------------------


def test_ticks_follow_the_clock() -> None:
    handler, clock = EchoHandler(), VirtualClock(100.0)
    with running(handler, clock=clock, limits=ServiceLimits(tick_seconds=0.5)) as run:
        run.turn()
        for step in (0.3, 0.3, 5.0):
            clock.advance(step)
            run.turn()
    assert handler.ticks == pytest.approx([100.0, 100.6, 105.6])


def test_calls_are_made_in_order_in_the_loops_thread() -> None:
    calls: list[tuple[int, str]] = []
    with running(EchoHandler(), limits=ServiceLimits(tick_seconds=3600.0)) as run:
        for number in range(5000):
            run.service.call_soon(
                lambda number=number: calls.append((number, threading.current_thread().name))
            )
        run.turn()
        here = threading.current_thread().name
    assert [number for number, _ in calls] == list(range(5000))
    assert here not in {name for _, name in calls}


@pytest.mark.parametrize("where", ["received", "authenticated", "closed", "tick", "call"])
def test_an_exception_in_a_handler_ends_the_service(
    where: str, caplog: pytest.LogCaptureFixture
) -> None:
    clock = VirtualClock()

    class Bug(Exception):
        pass

    class Buggy(EchoHandler):
        def received(self, link: Link, incoming: Incoming) -> None:
            if where == "received":
                raise Bug

        def authenticated(self, link: Link) -> None:
            if where == "authenticated":
                raise Bug

        def closed(self, link: Link, error: WireError | None) -> None:
            if where == "closed":
                raise Bug

        def tick(self, now: float) -> None:
            if where == "tick" and now > 0:
                raise Bug

    def call() -> None:
        if where == "call":
            raise Bug

    with pytest.raises(Bug), running(Buggy(), clock=clock) as run:
        with run.client() as client:
            client.offer(Echo())
            clock.advance(1.0)
            run.service.call_soon(call)
            if where != "closed":
                run.join()
                with pytest.raises((PeerClosed, ConnectionBroken)):
                    client.receive(timeout=PATIENCE)
        run.join()
    assert "ends by an internal error" in caplog.text


def test_stop_sends_what_was_offered_and_closes_all() -> None:
    handler = EchoHandler()
    with running(handler) as run, run.client() as client:
        stranger = run.stranger()
        client.send(Echo("last"), [pattern(24 << 20)], timeout=PATIENCE)
        wait_readable(client.stream)
        run.service.stop()
        run.service.stop()
        run.turn()
        with pytest.raises(ConnectionRefused):
            run.stranger()
        incoming = client.receive(timeout=PATIENCE)
        assert b"".join(incoming.payload) == pattern(24 << 20)
        with pytest.raises((PeerClosed, ConnectionBroken)):
            client.receive(timeout=PATIENCE)
        assert read_until_end(stranger) == b""
        run.join()
        assert handler.closings.get(timeout=PATIENCE)[1] is None
        run.service.call_soon(lambda: pytest.fail("it is over"))
    assert nothing_more(handler)


def test_stop_does_not_wait_for_who_does_not_read() -> None:
    handler = EchoHandler()
    limits, clock = ServiceLimits(linger_seconds=0.2, tick_seconds=3600.0), VirtualClock()
    options = {"limits": limits, "clock": clock}
    with running(handler, address="memory://", **options) as run, run.client() as client:
        client.send(Echo(), [bytes(24 << 20)], timeout=PATIENCE)
        wait_readable(client.stream)
        run.service.stop()
        run.join()
        assert handler.closings.get(timeout=PATIENCE)[1] is None


def test_stop_before_run() -> None:
    service = Service(listen("memory://"), [EchoHandler()], job=JOB, secret=SECRET)
    service.stop()
    service.run()


def test_it_rests_when_nothing_happens() -> None:
    handler, clock = EchoHandler(), VirtualClock()
    rests: list[float] = []
    rested = threading.Event()
    service = Service(
        listen("memory://"),
        [handler],
        job=JOB,
        secret=SECRET,
        clock=clock,
        limits=ServiceLimits(tick_seconds=0.05),
    )
    original = service.poller.events

    def watched(seconds: float) -> Iterator[tuple[Callable[[int], None], int]]:
        happened = [*original(seconds)]
        if not happened:
            rests.append(seconds)
        if len(rests) == 3:
            rested.set()
        yield from happened

    run = Running(service)
    with run.client() as client:
        ask(client, "hello")
        run.turn()
        service.poller.events = watched  # type: ignore[method-assign]
        assert rested.wait(PATIENCE), "the loop never waits"
    assert rests[:3] == pytest.approx([0.05] * 3)
    service.stop()
    run.join()


def test_too_many_open_files_are_survived(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    clock = VirtualClock()
    listener = listen("tcp://127.0.0.1:0")
    accept, failures = listener.accept, [WireError("too many open files")] * 2

    def sometimes() -> object:
        if failures:
            raise failures.pop()
        return accept()

    monkeypatch.setattr(listener, "accept", sometimes)
    service = Service(listener, [EchoHandler()], job=JOB, secret=SECRET, clock=clock)
    run = Running(service)
    run.turn()
    waiting = run.stranger()
    for left in (1, 0):
        run.turn()
        run.turn()
        assert len(failures) == left  # it is tried once, until the next tick
        clock.advance(0.2)
    stranger = Connection(waiting, CATALOG)
    authenticate(stranger, Identity(JOB, "worker:0"), SECRET, server="ps:0", timeout=PATIENCE)
    ask(stranger, "served")
    service.stop()
    run.join()
    assert caplog.text.count("trying again at the next tick") == 2


# Connections that a service opens itself -------------------------------------------------------


def test_an_adopted_connection_is_a_link_like_any_other() -> None:
    server_handler, client_handler = EchoHandler(), EchoHandler()
    client_handler.received = lambda link, incoming: got.set()  # type: ignore[method-assign]
    got = threading.Event()
    with running(server_handler) as server, running(client_handler) as client:
        connection = server.client("ps:1")
        client.service.call_soon(
            lambda: client.service.adopt(connection, Identity(JOB, "ps:0")).offer(Echo("hello"))
        )
        assert client_handler.links.get(timeout=PATIENCE).identity.task == "ps:0"
        assert got.wait(PATIENCE)
        server.service.stop()
        assert isinstance(client_handler.closings.get(timeout=PATIENCE)[1], PeerClosed)


def test_denied_says_no_more_than_the_reason() -> None:
    with running(EchoHandler()) as run:
        stranger = Connection(run.stranger(), HANDSHAKE_CATALOG)
        stranger.send(Hello("another", "", "worker:0", 0, bytes(32)), timeout=PATIENCE)
        assert stranger.receive(timeout=PATIENCE).message == Denied("job")
        with pytest.raises((PeerClosed, ConnectionBroken)):
            stranger.receive(timeout=PATIENCE)


def test_departures_of_strangers_are_not_worth_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING), running(EchoHandler()) as run:
        run.stranger().close()
        with run.client() as good:
            ask(good, "good")
    assert not caplog.records

"""A worker's connections to the parameter servers: requests, their answers, what breaks between.

A request goes to a server once. What breaks on the way is sent again, with the same sequence
number, until there is an answer or the deadline is reached.
"""

from __future__ import annotations

import logging
import select
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

import msgspec

from trireme.cluster.view import ServerEntry, View
from trireme.errors import (
    AuthenticationError,
    Fenced,
    FrameError,
    JobFailed,
    ModelMismatchError,
    Rejected,
    StaleEpochError,
    UnsupportedOptimizerError,
    WaitTimeout,
    WireError,
    WireTimeout,
)
from trireme.ps.loan import Loan
from trireme.ps.messages import (
    PS_CATALOG,
    Applied,
    FencedVerdict,
    PushReply,
    Refused,
    RejectedVerdict,
    Waiting,
)
from trireme.wire.connection import Connection, Incoming
from trireme.wire.handshake import HANDSHAKE_TIMEOUT, Identity, authenticate
from trireme.wire.message import Message
from trireme.wire.shm import ShmStream, shm_address
from trireme.wire.spin import Spin
from trireme.wire.transport import Stream, connect

__all__ = [
    "BACK_OFF",
    "SLICE",
    "Answer",
    "ClientOptions",
    "Membership",
    "Overlapping",
    "Patience",
    "Place",
    "Request",
    "ServerLink",
    "ServerLinks",
    "identity_of",
]

_log = logging.getLogger(__name__)

Overlapping = Literal["auto", "on", "off"]
"""Whether pushes leave while backward runs: where that is possible, and where `auto`, also pays."""

Answer = tuple[Message, Sequence[memoryview]]
"""What a server has answered, and the payload that came with it."""

Place = Callable[[int, Message, int], Sequence[memoryview]]
"""Says where a payload of so many bytes goes that comes from a server with a message."""

SLICE = 0.5
"""Seconds between two looks at whether the job is over."""

BACK_OFF = 0.02
"""Seconds before a request that met another view, or a cut, is sent again."""

_HURRIED_SECONDS = 3.0


class Membership(Protocol):
    """Where a client learns who serves, and whether the job still runs."""

    @property
    def view(self) -> View | None:
        """The newest view."""

    def check(self) -> None:
        """Returns while the job runs.

        Raises:
            JobFailed: it has ended; says who ended it, and why.
        """


@dataclass(frozen=True, slots=True)
class ClientOptions:
    """Who a client is, and how long it waits.

    Attributes:
        job: the job's id.
        secret: the job's.
        worker: the worker's index.
        incarnation: which start of this worker it is.
        epoch: which start of the job it has joined.
        retry_seconds: how long a server may be out of reach before that is an error.
        patience_seconds: how long an answer may be withheld, for instance until a slow worker's
            update is in, before that is an error.
        share_memory: whether to lend memory to servers of this host.
        aggregator: where the aggregator of this host listens; None where there is none.
        overlap: whether pushes that `begin` announces leave while backward runs.
        waiting: told why and for whom the answer is withheld, and since how many seconds.
        hurries: whether this worker is asked to stop: a server that is out of reach is given up
            sooner then.
    """

    job: str
    secret: bytes
    worker: int
    incarnation: int
    epoch: str = ""
    retry_seconds: float = 30.0
    patience_seconds: float = 1800.0
    share_memory: bool = True
    aggregator: str | None = None
    overlap: Overlapping = "auto"
    waiting: Callable[[str, Sequence[str], float], None] | None = None
    hurries: Callable[[], bool] = lambda: False


def identity_of(options: ClientOptions) -> Identity:
    """Returns who a client says it is."""
    task = f"worker:{options.worker}"
    return Identity(options.job, task, options.incarnation, options.epoch)


class Request(msgspec.Struct):
    """One server's share of a request: how to say it under a view, and with which payload."""

    build: Callable[[int], Message]
    payload: Sequence[memoryview] = ()


class Patience(msgspec.Struct):
    """Since when an answer is waited for, and on whom it depends as far as was said."""

    since: float
    names: Sequence[str] = ()


class ServerLink:
    """One server: its connection, and the request that waits for its answer."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.connection: Connection | None = None
        self.request: Request | None = None
        self.sequence = 0
        self.failing_since: float | None = None
        self.trusts_memory = True  # until something else was met under the name of its socket

    @property
    def name(self) -> str:
        """Which server it is, for messages; and where, while there is a connection."""
        return f"ps:{self.index}" if self.connection is None else self.connection.peer

    def close(self) -> None:
        """Closes the connection, if there is one. May be repeated."""
        if self.connection is not None:
            self.connection.close()
            self.connection = None


class ServerLinks:
    """All of them. Used by one thread, with one request at a time to each server.

    Args:
        options: who asks.
        membership: where to learn who serves.
        servers: how many there are.
        place: where payloads go.

    Attributes:
        options: may be replaced while nothing is under way; connections are then to be closed.
        links: by server.
        loans: what to lend to each server, if it is on this host; empty for nothing.
    """

    def __init__(
        self, options: ClientOptions, membership: Membership, servers: int, place: Place
    ) -> None:
        self.options = options
        self.links = [ServerLink(server) for server in range(servers)]
        self.loans: Sequence[Loan] = ()
        # An answer through memory is mostly there by then. Workers that sleep when a round is over
        # are woken together, often on one core: the system takes milliseconds to part them.
        self._spin = Spin(least=0.0005, most=0.005, share=0.25)
        self._membership = membership
        self._place = place

    def close(self) -> None:
        """Closes all connections; the next request connects again. May be repeated."""
        for link in self.links:
            link.close()

    def start(self, link: ServerLink, request: Request) -> None:
        """Sends a request; most of what goes wrong shows again, and is repaired, in `finish`.

        Raises:
            AuthenticationError: the server does not know this job's secret.
            WaitTimeout: there is no view of the cluster yet.
            JobFailed: the server is not part of the job any longer.
            WireError: it has been out of reach too long.
        """
        link.request = request
        link.sequence += 1
        try:
            self._send(link)
        except AuthenticationError:
            raise
        except WireError as error:
            self._lost(link, error)

    def finish(self, link: ServerLink, *, again: bool = True) -> Answer:
        """Waits for the answer to a link's request; see `finish_all`."""
        return self.finish_all([link], again=again)[0]

    def finish_all(self, links: Sequence[ServerLink], *, again: bool = True) -> list[Answer]:
        """Waits for the answers to the requests of several links.

        All are kept going meanwhile: a server may withhold its answer until another one has what
        broke, or was fenced off, on the way there.

        Args:
            links: each has a request that was `start`ed.
            again: whether to ask again under the newest view when it has changed.

        Raises:
            Fenced: this worker was replaced, or taken out of the job.
            Rejected: a server found the request senseless.
            ModelMismatchError, UnsupportedOptimizerError: what a worker showed does not fit.
            WaitTimeout: the answer was withheld too long; names those it was withheld for.
            JobFailed: the job ended meanwhile.
            WireError: a server was out of reach too long.
        """
        answers: dict[int, Answer] = {}
        patience = Patience(time.monotonic())
        waiting = links
        while waiting:
            heard = False
            for link in waiting:
                incoming = self._poll(link, blocking=len(waiting) == 1)
                if incoming is not None:
                    heard = True
                    answer = self._hear(link, incoming, patience, again=again)
                    if answer is not None:
                        answers[link.index] = answer
            if not heard and not self._readable(waiting):
                self._membership.check()
                self.check_patience(patience, waiting)
            if heard and len(answers) == len(links):
                break
            if heard:
                waiting = [link for link in links if link.index not in answers]
        return [answers[link.index] for link in links] if len(links) > 1 else [*answers.values()]

    def _poll(self, link: ServerLink, *, blocking: bool) -> Incoming | None:
        """Returns what a link has received, if anything; connects again where it has broken."""
        try:
            if link.connection is None:
                self._send(link)
            connection = link.connection
            assert connection is not None
            try:
                return connection.receive(timeout=SLICE) if blocking else connection.poll()
            except WireTimeout:
                return None  # of connecting and sending, it is a failure
        except (AuthenticationError, FrameError):
            raise
        except WireError as error:
            self._membership.check()
            self._lost(link, error)
            return None

    def _hear(
        self, link: ServerLink, incoming: Incoming, patience: Patience, *, again: bool
    ) -> Answer | None:
        """Takes a message; returns the answer to the link's request if it is that."""
        link.failing_since = None
        message = incoming.message
        if incoming.sequence != link.sequence:
            return None  # a late notice or answer of an earlier request
        if type(message) is PushReply and type(message.verdict) is Applied:
            link.request = None  # as nearly all answers are
            return message, incoming.payload
        if isinstance(message, Waiting):
            self.notice(message, patience)
            self._membership.check()
            return None
        if _was_fenced(message) and again:
            self._fenced(message)
            link.sequence += 1
            self._resend(link)
            return None
        if isinstance(message, Refused) and message.code == "apart":  # it was part of a sum
            link.sequence += 1
            self._resend(link)
            return None
        _raise_refusal(message)
        link.request = None
        return message, incoming.payload

    def _readable(self, links: Sequence[ServerLink]) -> bool:
        """Waits a little for something to read on any of several links; returns whether there is.

        They are looked at first where all of them lead through memory.
        """
        connections = [link.connection for link in links if link.connection is not None]
        if len(connections) < len(links) or len(links) == 1:
            return False  # one waits to be made again; or one alone has been waited on already
        poller = select.poll()
        for connection in connections:
            poller.register(connection, select.POLLIN)
        through_memory = all([connection.spin is not None for connection in connections])
        return self._spin.wait(poller.poll, SLICE, look=through_memory)

    def notice(self, message: Waiting, patience: Patience) -> None:
        """Notes for whom an answer waits, and says so."""
        patience.names = message.names
        if self.options.waiting is not None:
            self.options.waiting(message.reason, message.names, message.seconds)

    def _send(self, link: ServerLink) -> None:
        connection = link.connection or self._connect(link)
        assert link.request is not None
        view = self.view()
        connection.send(
            link.request.build(view.number),
            link.request.payload,
            sequence=link.sequence,
            timeout=self.options.retry_seconds,
        )

    def _resend(self, link: ServerLink) -> None:
        try:
            self._send(link)
        except WireError as error:
            self._lost(link, error)

    def _connect(self, link: ServerLink) -> Connection:
        """Connects to a server as the newest view has it, through memory where that can be."""
        entry = self.entry(link.index)
        connection = self._connect_by_memory(link, entry)
        if connection is None:
            stream = connect(entry.address, timeout=min(5.0, self.options.retry_seconds))
            connection = self._introduce(link, entry, stream)
        link.connection = connection
        return connection

    def _connect_by_memory(self, link: ServerLink, entry: ServerEntry) -> Connection | None:
        """Connects over the socket that a server of this host has for that; None without one.

        Any process of this host may take its name first. One that is not the server is told
        nothing, is lent nothing, and keeps nobody from reaching the server over TCP.
        """
        if not self.loans or not link.trusts_memory:
            return None
        try:
            stream = connect(shm_address(entry.address), timeout=1.0)
        except WireError as error:
            if isinstance(error, AuthenticationError):
                self._distrust(link, error)
            return None
        try:
            return self._introduce(link, entry, stream)
        except StaleEpochError:
            raise
        except AuthenticationError as error:
            self._distrust(link, error)
            return None

    def _distrust(self, link: ServerLink, error: AuthenticationError) -> None:
        link.trusts_memory = False
        who = f"worker:{self.options.worker}"
        _log.warning("%s goes on over TCP to ps:%d: %s", who, link.index, error)

    def _introduce(self, link: ServerLink, entry: ServerEntry, stream: Stream) -> Connection:
        """Returns a connection of which both ends have proven who they are."""
        options = self.options
        connection = Connection(stream, PS_CATALOG)
        connection.peer = f"ps:{link.index} at {entry.address}"
        connection.destination = lambda message, length: self._place(link.index, message, length)
        try:
            identity = identity_of(options)
            patience = min(HANDSHAKE_TIMEOUT, options.retry_seconds)
            server = f"ps:{link.index}"
            authenticate(connection, identity, options.secret, server=server, timeout=patience)
            if isinstance(stream, ShmStream):
                loan = self.loans[link.index]
                if loan.offer(connection, stream, timeout=options.retry_seconds):
                    connection.spin = self._spin
        except BaseException:
            connection.close()
            raise
        return connection

    def _lost(self, link: ServerLink, error: WireError) -> None:
        """A connection failed: makes ready to try again, or gives up."""
        link.close()
        now = time.monotonic()
        if link.failing_since is None:
            link.failing_since = now
            return
        patience = self.options.retry_seconds
        if self.options.hurries():
            patience = min(patience, _HURRIED_SECONDS)
        if now - link.failing_since > patience:
            lost = type(error)(
                f"worker:{self.options.worker} could not reach ps:{link.index} for "
                f"{patience:.0f} s: {error}"
            )
            lost.server = f"ps:{link.index}"
            raise lost from error
        time.sleep(BACK_OFF)

    def check_patience(self, waiting: Patience, links: Sequence[ServerLink]) -> None:
        """Returns while answers may still be waited for.

        Args:
            waiting: since when, and for whom as far as was said.
            links: the servers whose answers are missing.

        Raises:
            WaitTimeout: no longer; names those it was withheld for, else who did not answer.
        """
        patience, who = self.options.patience_seconds, f"worker:{self.options.worker}"
        if time.monotonic() - waiting.since <= patience:
            return
        if waiting.names:
            raise WaitTimeout(
                f"{who} waited {patience:.0f} s for an answer that was withheld until "
                f"{', '.join(waiting.names)} had pushed: see whether it still runs"
            )
        silent = ", ".join(link.name for link in links)
        raise WaitTimeout(
            f"{who} waited {patience:.0f} s for an answer of {silent}, which said nothing: see "
            "whether it still runs"
        )

    def view(self) -> View:
        """Returns the newest view.

        Raises:
            WaitTimeout: there is none yet.
        """
        view = self._membership.view
        if view is None:
            raise WaitTimeout(f"worker:{self.options.worker} has no view of the cluster yet")
        return view

    def entry(self, server: int) -> ServerEntry:
        """Returns where a server is.

        Raises:
            JobFailed: it is not in the newest view.
        """
        for entry in self.view().servers:
            if entry.index == server:
                return entry
        raise JobFailed(f"ps:{server} is not part of the job any longer")

    def _fenced(self, message: Message) -> None:
        """Another view: finds out whether this worker is still in it."""
        self._membership.check()
        view = self.view()
        me = (self.options.worker, self.options.incarnation)
        known = {(entry.index, entry.incarnation) for entry in view.workers}
        number, reason = _fence_of(message)
        if me not in known and view.number >= number:
            raise Fenced(
                f"worker:{me[0]} is no longer part of the job ({reason}): it was taken for lost, "
                "or another process took its place",
                number,
            )
        time.sleep(BACK_OFF)  # either side learns the newest view within moments


def _was_fenced(message: Message) -> bool:
    if isinstance(message, PushReply):
        return isinstance(message.verdict, FencedVerdict)
    return isinstance(message, Refused) and message.code == "fenced"


def _fence_of(message: Message) -> tuple[int, str]:
    if isinstance(message, PushReply) and isinstance(message.verdict, FencedVerdict):
        return message.verdict.view, message.verdict.reason
    assert isinstance(message, Refused)
    return message.view, message.reason


def _raise_refusal(message: Message) -> None:
    """Raises what a refusal means; `busy` is left to who asked."""
    if isinstance(message, PushReply) and isinstance(message.verdict, RejectedVerdict):
        raise Rejected(f"the parameter server rejected a push: {message.verdict.reason}")
    if not isinstance(message, Refused) or message.code == "busy":
        return
    if message.code == "fenced":
        raise Fenced(message.reason, message.view)
    kinds: Mapping[str, type[Exception]] = {
        "mismatch": ModelMismatchError,
        "optimizer": UnsupportedOptimizerError,
    }
    raise kinds.get(message.code, Rejected)(message.reason)

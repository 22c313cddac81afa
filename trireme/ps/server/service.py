"""One parameter server task: accepts connections and drives its shard.

The loop has one thread: it receives a message in place, lets the shard decide, and sends the answer
before it handles the next message. So there are no locks.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import msgspec
import torch

from trireme.certificates import Certificates
from trireme.clock import clock_name
from trireme.cluster.coordinator import Coordinator
from trireme.cluster.member import Member
from trireme.cluster.member_protocol import MemberConfig
from trireme.cluster.member_state import News
from trireme.cluster.messages import Dismissed, JobOver
from trireme.cluster.state import Policy
from trireme.cluster.view import ServerEntry, View
from trireme.errors import (
    ConfigurationError,
    FrameError,
    JobFailed,
    Rejected,
    StaleEpochError,
    TriremeError,
    WireError,
)
from trireme.job_config import JobConfig
from trireme.metrics import Registry
from trireme.ps.catalog import PS_CATALOG, PS_MESSAGES
from trireme.ps.flat import as_bytes
from trireme.ps.layout import ITEM_SIZES
from trireme.ps.messages import LendMemory, MemoryLent, Push, Refused, Share, Trace, Traced, Waiting
from trireme.ps.server.dispatcher import Dispatcher
from trireme.ps.server.metrics import ShardMetrics
from trireme.ps.server.receive_buffer import ReceiveBuffer, Staging
from trireme.ps.server.trace import Note, Notes
from trireme.ps.shard.instructions import Instruction, Send
from trireme.ps.shard.shard import Shard
from trireme.ps.shard.values.segment_optimizer import load_optimizers
from trireme.ps.shard.values.snapshot_tensors import tensors_from
from trireme.ps.snapshot_messages import Load, TensorSpec
from trireme.wire.connection import Connection
from trireme.wire.frame_reader import Incoming
from trireme.wire.handshake import Identity, authenticate
from trireme.wire.link import Link
from trireme.wire.message import Message
from trireme.wire.service import Handler, Service
from trireme.wire.shared_memory import available
from trireme.wire.transport import Listener, connect, listen
from trireme.wire.transports.shm import shm_address

_log = logging.getLogger(__name__)

Recording = Callable[[Mapping[str, float | str], bool], object]
"""Takes a server's status, by name, and whether it is the last one."""

_RETRY_SECONDS = 0.2
_SHARE_BYTES = 1 << 32
_MOST_TENSORS = 16  # of the size of the model that a checkpoint has for a server, at most
_SLACK_BYTES = 1 << 20  # for scalars


class _Route(msgspec.Struct, frozen=True, eq=False):
    """The route of an answer.

    Attributes:
        link: the link over which it is sent.
        sequence: the sequence of the request.
        staging: the receive buffer that is free again once the answer is sent.
    """

    link: Link
    sequence: int
    staging: Staging | None = None


class ShardHandler:
    """Serves one shard over a `Service`.

    Args:
        index: this server's task index.
        now: the service's clock.
        metrics: measures the shard; None for no metrics.

    Attributes:
        shard: the shard that is served.
        dispatcher: routes the messages of connections to it.
        leader_gone: called when the connection to server 0 is lost.
    """

    messages: tuple[type[Message], ...] = PS_MESSAGES

    def __init__(
        self,
        index: int,
        now: Callable[[], float] = time.monotonic,
        metrics: ShardMetrics | None = None,
    ) -> None:
        self.index = index
        self.shard = Shard(index)
        self.dispatcher: Dispatcher[Link] = Dispatcher(self.shard)
        self._now = now
        self._metrics = metrics
        self._applied = 0  # how many updates were applied when that was looked at last
        self._notes = Notes()
        self._receive_buffer = ReceiveBuffer(self.shard.state)
        self._values: Sequence[torch.Tensor] = ()
        self._value_bytes: tuple[memoryview, ...] = ()
        self.leader_gone: Callable[[], None] = lambda: None

    # -- the service's handler -------------------------------------------------------------------

    def authenticated(self, link: Link) -> None:
        """Begins to serve a peer that has authenticated."""
        link.connection.destination = lambda message, length: self._place(link, message, length)
        word = self.dispatcher.opened(link)
        if word is not None:
            link.offer(word)

    def received(self, link: Link, incoming: Incoming) -> None:
        """Gives a message to the shard, and carries out the shard's instructions."""
        message, payload = incoming.message, incoming.payload
        if isinstance(message, Trace):
            self._trace(link, incoming.sequence, message)
            return
        superseded = self.dispatcher.admit(link, message)
        if superseded is not None:
            superseded.close()
            if superseded is link:
                return
        began, staging = self._now(), None
        what: object = None
        if isinstance(message, LendMemory):
            accepted = self._receive_buffer.borrow(link, message)
            link.offer(MemoryLent(accepted), sequence=incoming.sequence)
            return
        if isinstance(message, Push):
            staging = self._receive_buffer.take(link, payload)
            what = staging.gradients
        elif isinstance(message, Load):
            try:
                what = tensors_from(message.tensors, payload or [memoryview(bytearray())])
            except Rejected as error:
                refused = Refused("rejected", str(error), message.view)
                link.offer(refused, sequence=incoming.sequence)
                return
        elif isinstance(message, Share):
            data = bytearray().join(payload)
            what = torch.frombuffer(data, dtype=torch.uint8) if data else torch.empty(0)
        route = _Route(link, incoming.sequence, staging)
        self._carry_out(began, self.dispatcher.dispatch(began, link, route, message, what))
        if self._notes.wanted_by:
            name, task = type(message).__name__, link.identity.task
            self._notes.add(Note(name, began, self._now(), task))

    def _trace(self, link: Link, sequence: int, message: Trace) -> None:
        """Begins or ends a trace of this server, or sends it."""
        task, payload = link.identity.task, b""
        if message.action == "start":
            self._notes.wanted_by.add(task)
        elif message.action == "stop":
            self._notes.wanted_by.discard(task)
        else:
            payload = self._notes.export()
        views = [memoryview(payload)] if payload else []
        link.offer(Traced(time.monotonic(), clock_name()), views, sequence=sequence)

    def closed(self, link: Link, error: WireError | None) -> None:
        """Forgets a link. The coordinator decides whether its task is lost."""
        self._notes.wanted_by.discard(link.identity.task)
        if self.dispatcher.closed(link):
            self.leader_gone()

    def tick(self, now: float) -> None:
        """Passes the time to the shard."""
        self._carry_out(now, self.shard.tick(now))
        if self._metrics is not None:
            self._metrics.look(now, self.shard)

    def status(self) -> Mapping[str, float | str]:
        """Returns the shard's status, if it is measured. In the service's thread, or after it."""
        metrics = self._metrics
        return {} if metrics is None else metrics.status(self._now(), self.shard)

    # -- from the coordinator --------------------------------------------------------------------

    def view(self, view: View) -> None:
        """Passes a new view to the shard. In the service's thread."""
        now = self._now()
        self._carry_out(now, self.shard.view(now, view))

    # -- inside ----------------------------------------------------------------------------------

    def _place(self, link: Link, message: Message, length: int) -> Sequence[memoryview]:
        if isinstance(message, Push):
            return self._receive_buffer.place(link, length, message.order)
        if isinstance(message, Load):
            expected = sum(_size_of(spec) for spec in message.tensors)
            if length != expected:
                raise FrameError(f"a load announces {length} bytes and its tensors take {expected}")
            if length > self._most_loaded():
                raise FrameError(f"a load announces {length} bytes, more than its model can have")
            return [memoryview(bytearray(length))]
        if isinstance(message, Share) and length <= _SHARE_BYTES:
            return [memoryview(bytearray(length))]
        raise FrameError(f"{type(message).__name__} has no payload of {length} bytes")

    def _most_loaded(self) -> int:
        """Returns the most bytes of a load: values, average, and any optimizer's state."""
        layout = self.shard.state.layout
        if layout is None:
            return 0
        elements = sum(part.length for part in layout.parts(self.index))
        return _SLACK_BYTES + _MOST_TENSORS * 8 * elements

    def _carry_out(self, began: float, instructions: Sequence[Instruction]) -> None:
        """Sends what the shard asks for, and lets it go on as long as it has more to decide.

        Args:
            began: when the shard began to decide this; the steps that it has made are measured.
            instructions: what it asks for.
        """
        while True:
            state = self.shard.state
            if state.counters["applied"] != self._applied:
                self._applied, ended = state.counters["applied"], self._now()
                if self._metrics is not None:
                    self._metrics.applied(ended - began)
                if self._notes.wanted_by:
                    self._notes.add(Note("apply", began, ended, step=state.step))
            for instruction in instructions:
                if isinstance(instruction, Send):
                    server = self.dispatcher.link_for(instruction)
                    if server is not None:
                        server.offer(instruction.message)
                    continue
                route = instruction.route
                assert isinstance(route, _Route)
                if route.staging is not None and not isinstance(instruction.message, Waiting):
                    route.staging.busy = False
                payload = self._bytes(instruction.payload)
                route.link.offer(instruction.message, payload, sequence=route.sequence)
            if not self.shard.due:
                return
            began = self._now()
            instructions = self.shard.go_on(began)

    def _bytes(self, tensors: Sequence[torch.Tensor]) -> Sequence[memoryview]:
        """Returns the memory of tensors, which nearly always are the same values as before."""
        if tensors is not self._values:
            self._values = tensors
            self._value_bytes = tuple(as_bytes(tensor) for tensor in tensors if tensor.numel())
        return self._value_bytes


class LeaderLink:
    """Keeps a server connected to server 0, which decides for all servers.

    A thread of its own connects, and connects again when the connection is lost; the connection
    itself is served by the service's loop.

    Args:
        service: serves the connection in its loop.
        identity: this server's.
        secret: the job's.
        certificates: this server's, where the job uses TLS.
    """

    def __init__(
        self,
        service: Service,
        identity: Identity,
        secret: bytes,
        certificates: Certificates | None = None,
    ) -> None:
        self._service = service
        self._identity = identity
        self._secret = secret
        self._certificates = certificates
        self._lost = threading.Event()
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None

    def follow(self, leader: ServerEntry, epoch: str = "") -> None:
        """Connects to server 0, and stays connected.

        Args:
            leader: server 0; only that of the first call counts.
            epoch: the job's epoch.
        """
        self._identity = replace(self._identity, epoch=epoch)
        if self._thread is None:
            self._thread = threading.Thread(
                target=self._run, args=(leader,), name="leader-link", daemon=True
            )
            self._thread.start()

    def lost(self) -> None:
        """Connects again, as the connection is lost."""
        self._lost.set()

    def close(self) -> None:
        """Ends the thread, without waiting for it."""
        self._closed.set()
        self._lost.set()

    def _run(self, leader: ServerEntry) -> None:
        said = -math.inf
        while not self._closed.is_set():
            try:
                stream = connect(leader.address, timeout=5.0, certificates=self._certificates)
                connection = Connection(stream, PS_CATALOG)
                authenticate(connection, self._identity, self._secret, server="ps:0")
            except (WireError, ConfigurationError) as error:
                if isinstance(error, StaleEpochError):
                    _log.warning("%s", error)
                    return  # this process has no other epoch
                # At the end of a job ps:0 may be gone before this server hears that it is over.
                if not self._closed.wait(_RETRY_SECONDS) and time.monotonic() > said + 10.0:
                    said = time.monotonic()
                    _log.warning("%s cannot reach ps:0: %s", self._identity.task, error)
                continue
            self._lost.clear()
            if not self._closed.is_set():
                peer = Identity(self._identity.job, "ps:0", epoch=self._identity.epoch)
                self._service.call_soon(partial(self._service.adopt, connection, peer))
                self._lost.wait()


@dataclass(frozen=True)
class ServerConfig:
    """One parameter server task.

    Attributes:
        job: the job's id.
        secret: the job's.
        index: this server's task index.
        listen: the address to listen at, with its scheme; port 0 leaves it to the system.
        coordinator: the coordinator's address; None where this server hosts it.
        policy: the policy of a coordinator that is hosted here.
        config: the job's configuration.
        certificates: this server's, where the job uses TLS.
    """

    job: str
    secret: bytes = field(repr=False)
    index: int
    listen: str
    coordinator: str | None
    policy: Policy
    config: JobConfig = field(default_factory=JobConfig)
    certificates: Certificates | None = None


def serve(
    server: ServerConfig,
    on_listening: Callable[[str], None],
    *,
    registry: Registry | None = None,
    record: Recording = lambda status, last: None,
) -> JobOver | None:
    """Serves one shard until the job is over.

    Args:
        server: the server's configuration.
        on_listening: is called with the server's address, before anything else.
        registry: holds the server's metrics; a new one by default.
        record: is called with the server's status every half second, and once more, with True,
            when the job is over.

    Returns:
        How the job ended; None when the service was stopped from outside.

    Raises:
        AddressInUse: the address is taken; names its holder.
        ClusterError: the coordinator refused this server.
    """
    # One BLAS thread a process is the launcher's business; autograd is of no use here.
    torch.set_grad_enabled(False)
    load_optimizers()
    listener = listen(
        server.listen,
        allow_plaintext=server.config.allow_plaintext,
        certificates=server.certificates,
    )
    on_listening(listener.address)
    return _Server(server, listener, registry or Registry(), record).run()


class _Server:
    """A server process: its shard, service and membership."""

    def __init__(
        self, server: ServerConfig, listener: Listener, registry: Registry, record: Recording
    ) -> None:
        self._server = server
        self._record = record
        identity = Identity(server.job, f"ps:{server.index}")
        self._handler = ShardHandler(server.index, metrics=ShardMetrics(registry, self._report))
        handlers: list[Handler] = [self._handler]
        epoch = ""  # until this server has joined
        if server.coordinator is None:
            coordinator = Coordinator(server.policy, on_done=lambda: self._service.stop())
            handlers.append(coordinator)
            epoch = coordinator.state.epoch
        self._service = Service(
            listener,
            handlers,
            job=server.job,
            secret=server.secret,
            epoch=epoch,
            serves=(identity.task, *(("coordinator:0",) if epoch else ())),
            beside=beside(listener.address) if server.config.transport == "auto" else (),
        )
        self._leader = LeaderLink(self._service, identity, server.secret, server.certificates)
        self._handler.leader_gone = self._leader.lost
        self._member = Member(
            MemberConfig(
                coordinator=server.coordinator or listener.address,
                job=server.job,
                role="ps",
                index=server.index,
                secret=server.secret,
                certificates=server.certificates,
                address=listener.address,
                connect_timeout=server.policy.join_timeout,
            )
        )
        self._over: JobOver | None = None
        self._failure: Exception | None = None

    def run(self) -> JobOver | None:
        """Serves, and joins in another thread: this loop may serve the coordinator itself."""
        self._member.subscribe(self._heard)
        joining = threading.Thread(target=self._join, name="join", daemon=True)
        joining.start()
        try:
            self._service.run()
            self._record(self._handler.status(), True)
            if self._member.dismissed is not None:
                self._member.leave("finished", self._member.dismissed.reason)
        finally:
            self._leader.close()
            self._member.close()
        if self._failure is not None:
            raise self._failure
        return self._over

    def _join(self) -> None:
        try:
            self._member.join()
        except JobFailed:
            self._service.stop()  # `over` says how
        except TriremeError as error:
            self._failure = error
            self._service.stop()

    def _heard(self, news: News) -> None:
        """Takes a new view, its dismissal, or the end of the job. In the member's thread."""
        if isinstance(news, Dismissed):
            self._service.stop()
            return
        if isinstance(news, View):
            self._service.epoch = self._handler.dispatcher.epoch = self._member.epoch
            self._service.call_soon(partial(self._handler.view, news))
            if self._server.index != 0:
                self._leader.follow(news.servers[0], self._member.epoch)
            return
        self._over = news
        self._leader.close()
        if self._server.coordinator is not None:
            self._service.stop()

    def _report(self, status: Mapping[str, float | str]) -> None:
        self._member.report(status)
        self._record(status, False)


def beside(address: str) -> list[Listener]:
    """Returns listeners for workers of this host that lend memory; none where that cannot be."""
    if not available() or not address.startswith(("tcp://", "tls://")):
        return []
    try:
        return [listen(shm_address(address))]
    except WireError as error:
        _log.warning("no shared memory with workers of this host: %s", error)
        return []


def _size_of(spec: TensorSpec) -> int:
    sizes = {**ITEM_SIZES, "int64": 8, "int32": 4, "uint8": 1, "bool": 1}
    if spec.dtype not in sizes or spec.stop < spec.start:
        raise FrameError(f"a tensor of a load makes no sense: {spec}")
    return sizes[spec.dtype] * (1 if spec.group >= 0 else spec.stop - spec.start)

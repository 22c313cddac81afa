"""One parameter server task: accepts connections and drives its shard.

The loop is single-threaded: a message is received in place, the shard decides, the answer goes
out, and only then comes the next one. There is no lock to hold and none to lose.
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

from trireme.clock import clock_name
from trireme.cluster.coordinator import Coordinator
from trireme.cluster.member import Member, MemberConfig
from trireme.cluster.messages import JobOver
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
from trireme.ps.flat import as_bytes
from trireme.ps.layout import ITEM_SIZES
from trireme.ps.messages import (
    PS_CATALOG,
    PS_MESSAGES,
    LendMemory,
    Load,
    MemoryLent,
    Push,
    Refused,
    Share,
    TensorSpec,
    Trace,
    Traced,
    Waiting,
)
from trireme.ps.server.dispatcher import Dispatcher
from trireme.ps.server.metrics import Observation
from trireme.ps.server.receive_buffer import ReceiveBuffer, Staging
from trireme.ps.server.trace import Notes
from trireme.ps.shard.instructions import Instruction, Send
from trireme.ps.shard.parameters import make_values, tensors_from
from trireme.ps.shard.segment_optimizer import load_optimizers
from trireme.ps.shard.shard import Shard
from trireme.wire.connection import Connection
from trireme.wire.frame_reader import Incoming
from trireme.wire.handshake import Identity, authenticate
from trireme.wire.message import Message
from trireme.wire.service import Handler, Link, Service
from trireme.wire.shared_memory import available
from trireme.wire.transport import Listener, connect, listen
from trireme.wire.transports.shm import shm_address

__all__ = ["LeaderLink", "Recording", "ServerConfig", "ShardHandler", "beside", "serve"]

_log = logging.getLogger(__name__)

Recording = Callable[[Mapping[str, float | str], bool], object]
"""Takes how a server is, by name; and whether it is for the last time."""

_RETRY_SECONDS = 0.2
_SHARE_BYTES = 1 << 32
_MOST_TENSORS = 16  # of the size of the model that a checkpoint has for a server, at most
_SLACK_BYTES = 1 << 20  # for scalars


class _Route(msgspec.Struct, frozen=True, eq=False):
    """Where an answer goes.

    Attributes:
        link: over which link.
        sequence: of the request that it answers.
        staging: what is not needed any longer once it is out.
    """

    link: Link
    sequence: int
    staging: Staging | None = None


class ShardHandler:
    """Serves one shard over a `Service`.

    Args:
        index: this server's task index.
        now: the service's clock.
        observation: who watches the shard, if anybody.

    Attributes:
        shard: what is served.
        dispatcher: who may say what to it, and over which connection.
        leader_gone: called when the connection to server 0 is lost.
    """

    messages: tuple[type[Message], ...] = PS_MESSAGES

    def __init__(
        self,
        index: int,
        now: Callable[[], float] = time.monotonic,
        observation: Observation | None = None,
    ) -> None:
        self.index = index
        self.shard = Shard(index, make_values if observation is None else observation.values)
        self.dispatcher: Dispatcher[Link] = Dispatcher(self.shard)
        self._now = now
        self._observation = observation
        self._notes = Notes()
        self._receive_buffer = ReceiveBuffer(
            index, lambda: self.shard.layout, lambda: self.shard.rule
        )
        self._values: Sequence[torch.Tensor] = ()
        self._value_bytes: tuple[memoryview, ...] = ()
        self.leader_gone: Callable[[], None] = lambda: None

    # -- the service's handler ------------------------------------------------------------------

    def authenticated(self, link: Link) -> None:
        """A peer has proven itself: payloads of its pushes go to memory of their own."""
        link.connection.destination = lambda message, length: self._place(link, message, length)
        word = self.dispatcher.opened(link)
        if word is not None:
            link.offer(word)

    def received(self, link: Link, incoming: Incoming) -> None:
        """Lets a message happen to the shard, and carries out what that leads to."""
        if isinstance(incoming.message, Trace):
            self._trace(link, incoming.sequence, incoming.message)
        elif not self._notes.wanted:
            self._take(link, incoming)
        else:
            began, name = time.monotonic(), type(incoming.message).__name__
            self._take(link, incoming)
            self._notes.handled(name, link.identity.task, began, time.monotonic())

    def _trace(self, link: Link, sequence: int, message: Trace) -> None:
        """Begins or ends to note what happens when, or tells it."""
        task, payload = link.identity.task, b""
        if message.action == "start":
            self._notes.start(task)
        elif message.action == "stop":
            self._notes.stop(task)
        else:
            payload = self._notes.export()
        if self._observation is not None:
            self._observation.spectator = self._notes if self._notes.wanted else None
        views = [memoryview(payload)] if payload else []
        link.offer(Traced(time.monotonic(), clock_name()), views, sequence=sequence)

    def _take(self, link: Link, incoming: Incoming) -> None:
        now, message = self._now(), incoming.message
        superseded = self.dispatcher.admit(link, message)
        if superseded is not None:
            superseded.close()
            if superseded is link:
                return
        staging, payload = None, incoming.payload
        if isinstance(message, LendMemory):
            accepted = self._receive_buffer.borrow(link, message)
            link.offer(MemoryLent(accepted), sequence=incoming.sequence)
            return
        what: object = None
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
        self._carry_out(self.dispatcher.happen(now, route, message, what))

    def closed(self, link: Link, error: WireError | None) -> None:
        """A peer is gone: the coordinator says whether for good."""
        self._notes.stop(link.identity.task)
        if self.dispatcher.closed(link):
            self.leader_gone()

    def tick(self, now: float) -> None:
        """Passes time on."""
        self._carry_out(self.shard.tick(now))
        if self._observation is not None:
            self._observation.look(now, self.shard)

    def status(self) -> Mapping[str, float | str]:
        """Returns how the shard is, where it is watched. In the service's thread, or after it."""
        observation = self._observation
        return {} if observation is None else observation.status(self._now(), self.shard)

    # -- from the coordinator -------------------------------------------------------------------

    def view(self, view: View) -> None:
        """Takes a new view. In the service's thread."""
        self._carry_out(self.shard.view(self._now(), view))

    # -- inside ---------------------------------------------------------------------------------

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
        """Returns how many bytes a load may have: values, average, and any optimizer's state."""
        layout = self.shard.layout
        if layout is None:
            return 0
        elements = sum(part.length for part in layout.parts(self.index))
        return _SLACK_BYTES + _MOST_TENSORS * 8 * elements

    def _carry_out(self, instructions: Sequence[Instruction]) -> None:
        self._follow(instructions)
        while self.shard.due:
            self._follow(self.shard.go_on(self._now()))

    def _follow(self, instructions: Sequence[Instruction]) -> None:
        for instruction in instructions:
            if isinstance(instruction, Send):
                server = self.dispatcher.told(instruction)
                if server is not None:
                    server.offer(instruction.message)
                continue
            route = instruction.route
            assert isinstance(route, _Route)
            if route.staging is not None and not isinstance(instruction.message, Waiting):
                route.staging.busy = False
            payload = self._bytes(instruction.payload)
            route.link.offer(instruction.message, payload, sequence=route.sequence)

    def _bytes(self, tensors: Sequence[torch.Tensor]) -> Sequence[memoryview]:
        """Returns the memory of tensors; the values are nearly always the same ones."""
        if tensors is not self._values:
            self._values = tensors
            self._value_bytes = tuple(as_bytes(tensor) for tensor in tensors if tensor.numel())
        return self._value_bytes


class LeaderLink:
    """Keeps a server connected to server 0, which decides synchronous rounds for all.

    A thread of its own connects, and connects again when the connection is lost; the connection
    itself is served by the service's loop.

    Args:
        service: whose loop serves the connection.
        identity: this server's.
        secret: the job's.
    """

    def __init__(self, service: Service, identity: Identity, secret: bytes) -> None:
        self._service = service
        self._identity = identity
        self._secret = secret
        self._lost = threading.Event()
        self._closed = threading.Event()
        self._thread: threading.Thread | None = None

    def follow(self, leader: ServerEntry, epoch: str = "") -> None:
        """Connects to server 0, and stays connected.

        Args:
            leader: where it is; only the first call's counts.
            epoch: which start of the job this task has joined.
        """
        self._identity = replace(self._identity, epoch=epoch)
        if self._thread is None:
            self._thread = threading.Thread(
                target=self._run, args=(leader,), name="leader-link", daemon=True
            )
            self._thread.start()

    def lost(self) -> None:
        """The connection is gone: makes another."""
        self._lost.set()

    def close(self) -> None:
        """Gives up; does not wait."""
        self._closed.set()
        self._lost.set()

    def _run(self, leader: ServerEntry) -> None:
        said = -math.inf
        while not self._closed.is_set():
            try:
                connection = Connection(connect(leader.address, timeout=5.0), PS_CATALOG)
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
                self._service.call_soon(partial(self._adopt, connection))
                self._lost.wait()

    def _adopt(self, connection: Connection) -> None:
        identity = Identity(self._identity.job, "ps:0", epoch=self._identity.epoch)
        self._service.adopt(connection, identity)


@dataclass(frozen=True)
class ServerConfig:
    """One parameter server task.

    Attributes:
        job: the job's id.
        secret: the job's.
        index: this server's task index.
        listen: the address to listen at, with its scheme; port 0 leaves it to the system.
        coordinator: the coordinator's address; None where this server hosts it.
        policy: what the job expects, for a coordinator hosted here.
        config: what was asked for of the job.
    """

    job: str
    secret: bytes
    index: int
    listen: str
    coordinator: str | None
    policy: Policy
    config: JobConfig = field(default_factory=JobConfig)


def serve(
    server: ServerConfig,
    on_listening: Callable[[str], None],
    *,
    registry: Registry | None = None,
    record: Recording = lambda status, last: None,
) -> JobOver | None:
    """Serves one shard until the job is over.

    Args:
        server: which server this is.
        on_listening: told the address that was got, before anything else.
        registry: where the server counts; its own by default.
        record: told how the server is, every half second, as the coordinator is; and once more
            when all is over, with True.

    Returns:
        How the job ended; None when the service was stopped from outside.

    Raises:
        AddressInUse: the address is taken; names its holder.
        ClusterError: the coordinator did not let this server take part.
    """
    # One BLAS thread a process is the launcher's business; autograd is of no use here.
    torch.set_grad_enabled(False)
    load_optimizers()
    listener = listen(server.listen, allow_plaintext=server.config.allow_plaintext)
    on_listening(listener.address)
    return _Server(server, listener, registry or Registry(), record).run()


class _Server:
    """The parts of a server process, and how they learn of each other's end."""

    def __init__(
        self, server: ServerConfig, listener: Listener, registry: Registry, record: Recording
    ) -> None:
        self._server = server
        self._record = record
        identity = Identity(server.job, f"ps:{server.index}")
        self._handler = ShardHandler(server.index, observation=Observation(registry, self._report))
        handlers: list[Handler] = [self._handler]
        epoch = ""  # until this server has joined
        if server.coordinator is None:
            coordinator = Coordinator(server.policy, on_done=self._coordinator_done)
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
        self._leader = LeaderLink(self._service, identity, server.secret)
        self._handler.leader_gone = self._leader.lost
        self._member = Member(
            MemberConfig(
                coordinator=server.coordinator or listener.address,
                job=server.job,
                role="ps",
                index=server.index,
                secret=server.secret,
                address=listener.address,
                connect_timeout=server.policy.join_timeout,
            )
        )
        self._over: JobOver | None = None
        self._failure: Exception | None = None

    def run(self) -> JobOver | None:
        """Joins beside the loop, which may have to serve the coordinator that lets it join."""
        self._member.subscribe(self._heard)
        joining = threading.Thread(target=self._join, name="join", daemon=True)
        joining.start()
        try:
            self._service.run()
            self._record(self._handler.status(), True)
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

    def _heard(self, news: View | JobOver) -> None:
        """A new view, or the end. In the member's thread."""
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

    def _coordinator_done(self) -> None:
        self._service.stop()

    def _report(self, status: Mapping[str, float | str]) -> None:
        self._member.report(status)
        self._record(status, False)


def beside(address: str) -> list[Listener]:
    """Returns where workers of this host connect to lend memory; nothing where that cannot be."""
    if not available() or not address.startswith("tcp://"):
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

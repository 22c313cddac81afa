"""Decides which requests a client sends when, and which answers count. Without I/O.

Events come in as method calls, each with its time; what to send goes out as a list. A worker's
client and the simulator drive this same object.

A request is sent again with the same sequence when its connection breaks, until there is an
answer, or the server has refused connections or was out of reach for too long. A host that refuses
is within reach: the server's process is gone. Where nothing answers, the network may be the
worker's own: it tries for as long as it may come back to the job. A request that was fenced off is
sent again under the newest view, with a new sequence, while this worker is in that view.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

import msgspec

from trireme.certificates import Certificates
from trireme.cluster.view import ServerEntry, View
from trireme.errors import (
    ConnectTimeout,
    CopiesLost,
    Fenced,
    JobFailed,
    ModelMismatchError,
    NetworkLost,
    Rejected,
    TriremeError,
    UnsupportedOptimizerError,
    WaitTimeout,
    WireError,
    WireTimeout,
)
from trireme.ps.messages import (
    Applied,
    Drain,
    FencedVerdict,
    PushReply,
    Refused,
    RejectedVerdict,
    Waiting,
)
from trireme.ps.results import decided
from trireme.wire.handshake import Identity
from trireme.wire.message import Message

BACK_OFF = 0.02  # seconds until a request that met another view or no server is sent again

_HURRIED_SECONDS = 3.0
_SILENT_BACK_OFF = 0.5  # seconds; nothing answers at once where a cable is out
_NOTICE_SECONDS = 5.0
RETRY_SECONDS = 30.0

Answer = tuple[Message, Sequence[Any]]  # a server's answer, and its payload


@dataclass(frozen=True, slots=True)
class ClientOptions:
    """The identity of a client, and its timeouts."""

    job: str  # the job's id
    secret: bytes = field(repr=False)  # the job's
    worker: int  # the worker's index
    incarnation: int  # the worker's incarnation
    epoch: str = ""  # the job's epoch
    # how long a server may refuse connections, or break them off, before that is an error
    retry_seconds: float = RETRY_SECONDS
    rejoin_seconds: float = 600.0  # how long a server may be out of reach before that is an error
    # whether the coordinator is within reach, which names the server that takes a lost one's place
    reaches_coordinator: Callable[[], bool] = lambda: True
    # how long an answer may be withheld, for instance until a slow worker's update is in, before
    # that is an error
    patience_seconds: float = 1800.0
    share_memory: bool = True  # whether to lend memory to servers of this host
    # is called with the reason for a withheld answer, or why servers are out of reach; with the
    # tasks that it waits for; and with the seconds so far
    waiting: Callable[[str, Sequence[str], float], None] = lambda *notice: None
    # returns whether this worker is asked to stop: then a server that is out of reach is given up
    # sooner
    hurries: Callable[[], bool] = lambda: False
    certificates: Certificates | None = None  # the task's, where the job uses TLS

    @property
    def identity(self) -> Identity:
        """The identity of this worker, as it is now."""
        return Identity(self.job, f"worker:{self.worker}", self.incarnation, self.epoch)


class Request(msgspec.Struct):
    """A request to one server."""

    message: Message  # if it has a view, it is sent with the newest one
    payload: Sequence[Any] = ()  # the tensors or bytes that follow the message
    # whether it counts in the message's own view only: in another it is fenced off
    pinned: bool = False


class Transmit(msgspec.Struct, frozen=True):
    """Send a message to a server, over a new connection where there is none; see `Lanes.entry`."""

    shard: int
    sequence: int
    message: Message
    payload: Sequence[Any]


class Lane(msgspec.Struct, eq=False):
    """The requests to one shard."""

    index: int  # the shard's number
    request: Request | None = None  # the request that waits for its answer
    sequence: int = 0  # the sequence of the newest request
    due: float = math.inf  # when the request is sent again; never, as long as nothing went wrong
    failing_since: float | None = None  # since when the server has been out of reach
    # since when each attempt was refused or broken off, and none met silence
    refusing_since: float | None = None
    # the view that has fenced the request off, and the reason
    fenced: tuple[int, str] | None = None


class Divided(Exception):
    """The shards were divided anew: requests must be laid out over the new ones."""


class Lanes:
    """The requests of one client to the primaries of all shards, one lane for each."""

    def __init__(
        self, options: ClientOptions, shards: int, view: Callable[[], View | None]
    ) -> None:
        self.options = options  # may be replaced while no answer is waited for
        # the generation of the shards; None takes that of the first view
        self.generation: int | None = None
        # since when nothing answers at servers, and their names; None where all are within reach.
        # Any thread may read it.
        self.silent: tuple[float, str] | None = None
        self.lanes = [Lane(shard) for shard in range(shards)]  # by shard
        self.waiting: list[Lane] = []  # the lanes whose answers are missing
        self.answers: dict[int, Answer] = {}  # the answers to the last requests, by shard
        self.lost = False  # whether all copies of a shard were lost since the last `divide`
        self._view = view
        self._life: int | None = None
        self._again = True
        self._chief: int | None = None  # as the waiting requests were made
        self._since = 0.0
        self._noticed = -math.inf  # when it was last said that servers are out of reach
        self._names: Sequence[str] = ()

    # -- events ----------------------------------------------------------------------------------

    def ask(
        self, now: float, requests: Mapping[int, Request], *, again: bool = True
    ) -> list[Transmit]:
        """Asks servers something, in this order, and gives up earlier requests.

        What is fenced off is asked `again`, or an error. Raises `Divided`, `CopiesLost`.
        """
        if self.waiting:
            self._forget()
        self._check_generation()
        self.answers = {}
        self._again, self._chief = again, self.known_view().chief
        self._since, self._names = now, ()
        out: list[Transmit] = []
        for shard, request in requests.items():
            lane = self.lanes[shard]
            lane.request = request
            self.waiting.append(lane)
            lane.sequence += 1
            out.append(self._transmit(lane))
        return out

    def wait(self, now: float) -> None:
        self._check_generation()
        self._since = now

    def heard(
        self, now: float, shard: int, sequence: int, message: Message, payload: Sequence[Any]
    ) -> None:
        """Takes a message of a server, about the request of that sequence; raises refusals."""
        lane = self.lanes[shard]
        if lane.failing_since is not None:
            lane.failing_since = lane.refusing_since = self.silent = None
        if sequence != lane.sequence or lane.request is None:
            return  # about an earlier request
        if type(message) is not PushReply or type(message.verdict) is not Applied:
            if isinstance(message, Waiting):
                self._names = message.names
                if isinstance(lane.request.message, Drain):
                    # Others may train for as long as they like: the coordinator watches them.
                    self._since = now
                self._check_patience(now)
                self.options.waiting(message.reason, message.names, message.seconds)
                return
            error, lane.fenced = _error_of(message), None
            if isinstance(error, Fenced) and self._again and not lane.request.pinned:
                lane.fenced = error.view, str(error)
                lane.due = now + BACK_OFF  # both sides have the newest view within moments
                return
            if error is not None:
                self._give_up(error)
        lane.request = None
        self.waiting.remove(lane)
        self.answers[shard] = message, payload

    def broke(self, now: float, shard: int, error: WireError) -> None:
        """Notes that the connection to a server has failed, or could not be made.

        Raises the error once that lasts too long: one of the network where its process may live.
        """
        lane, options = self.lanes[shard], self.options
        if lane.request is None:
            return
        silent = isinstance(error, ConnectTimeout | NetworkLost | WireTimeout)
        if silent or not options.reaches_coordinator():
            lane.refusing_since = None
        elif lane.refusing_since is None:
            lane.refusing_since = now
        self._since = now  # an answer is not withheld by a server that is out of reach
        if lane.failing_since is None:
            lane.failing_since = lane.due = now
            return
        since, patience = lane.refusing_since, options.retry_seconds
        if since is None:
            since, patience = lane.failing_since, options.rejoin_seconds
        if options.hurries():
            since, patience = lane.failing_since, min(patience, _HURRIED_SECONDS)
        if now - since > patience:
            lost = type(error)(
                f"worker:{options.worker} could not reach {self.task(shard)} for {patience:.0f} "
                f"s: {error}"
            )
            if not silent:
                lost.server = self.task(shard)
            self._give_up(lost, error)
        lane.due = now + (_SILENT_BACK_OFF if silent else BACK_OFF)
        failing = [lane for lane in self.waiting if lane.failing_since is not None]
        names = tuple(self.task(lane.index) for lane in failing)
        self.silent = (lane.failing_since, ", ".join(names)) if silent else None
        if now - max(lane.failing_since, self._noticed) >= _NOTICE_SECONDS:
            self._noticed = now
            left = since + patience - now
            reason = f"out of reach, tried for {left:.0f} s more: {error}"
            options.waiting(reason, names, now - lane.failing_since)

    def tick(self, now: float) -> list[Transmit]:
        """Sends again what is due, and checks how long the answers have been withheld."""
        self._check_generation()
        out = [self._send_again(lane) for lane in self.waiting if lane.due <= now]
        self._check_patience(now)
        return out

    @property
    def due(self) -> float:
        return min([lane.due for lane in self.waiting], default=math.inf)

    def divide(self, shards: int) -> None:
        """Begins with other shards, as the newest view names them. Nothing is waited for."""
        self._forget()
        self.lost = False
        view = self._view()
        if view is not None:
            self.generation, self._life = view.generation, view.life
        self.lanes = [Lane(shard) for shard in range(shards)]
        self.answers = {}

    def entry(self, shard: int) -> ServerEntry:
        """Returns the entry of the server with the primary of a shard, in the newest view."""
        self._check_generation()
        view = self.known_view()
        index = view.primary(shard)
        entry = view.server(index)
        if entry is None:
            raise JobFailed(f"ps:{index} is not part of the job any longer")
        return entry

    def server(self, shard: int) -> int:
        """Returns the number of the server with a shard's primary, or with that of a former one."""
        view = self._view()
        gone = view is not None and 0 < len(view.shards) <= shard
        return shard if view is None or gone else view.primary(shard)

    def task(self, shard: int) -> str:
        return f"ps:{self.server(shard)}"

    def known_view(self) -> View:
        if (view := self._view()) is None:
            raise WaitTimeout(f"worker:{self.options.worker} has no view of the cluster yet")
        return view

    # -- inside ----------------------------------------------------------------------------------

    def _check_generation(self) -> None:
        view = self.known_view()
        if self.generation is None:
            self.generation, self._life = view.generation, view.life
        if view.life != self._life:
            self._life, self.generation, self.lost = view.life, view.generation, True
            self._give_up(
                CopiesLost(
                    "all copies of a part of the parameters were lost: the job goes back to its "
                    "newest checkpoint",
                    view.number,
                )
            )
        if view.generation != self.generation:
            self._forget()
            raise Divided

    def _transmit(self, lane: Lane) -> Transmit:
        assert lane.request is not None
        message, view = lane.request.message, self.known_view()
        number = view.number
        if not self._again and view.chief != self._chief:
            # Its refusal may have been lost with a connection. The chief loads the first values.
            self._give_up(Fenced("another worker is chief now", number))
        if lane.request.pinned:
            if message.view != number:  # type: ignore[attr-defined]
                self._give_up(Fenced(f"a request of view {message.view} came late", number))  # type: ignore[attr-defined]
        elif "view" in message.__struct_fields__:
            message = msgspec.structs.replace(message, view=number)
        return Transmit(lane.index, lane.sequence, message, lane.request.payload)

    def _send_again(self, lane: Lane) -> Transmit:
        lane.due = math.inf
        if lane.fenced is not None:
            self._check_membership(*lane.fenced)
            lane.fenced = None
            lane.sequence += 1
        return self._transmit(lane)

    def _check_membership(self, number: int, reason: str) -> None:
        """Checks that this worker is still in the job, once another view has fenced it off."""
        view, worker = self.known_view(), self.options.worker
        known = {(entry.index, entry.incarnation) for entry in view.workers}
        if (worker, self.options.incarnation) not in known and view.number >= number:
            said = (
                f"worker:{worker} is no longer part of the job ({reason}): it was taken for "
                "lost, or another process took its place"
            )
            self._give_up(Fenced(said, number))

    def _check_patience(self, now: float) -> None:
        patience = self.options.patience_seconds
        if now - self._since <= patience:
            return
        if self._names:
            did = "had confirmed it" if self._names[0].startswith("ps:") else "had pushed"
            what = f"that was withheld until {', '.join(self._names)} {did}"
        else:
            silent = [self.entry(lane.index) for lane in self.waiting]
            named = ", ".join(f"ps:{entry.index} at {entry.address}" for entry in silent)
            what = f"of {named}, which said nothing"
        waited = f"worker:{self.options.worker} waited {patience:.0f} s for an answer"
        self._give_up(WaitTimeout(f"{waited} {what}: see whether it still runs"))

    def _give_up(self, error: TriremeError, cause: Exception | None = None) -> NoReturn:
        self._forget()
        raise error from cause

    def _forget(self) -> None:
        self.silent = None
        for lane in self.waiting:
            lane.request = lane.fenced = None
            lane.due = math.inf
        self.waiting = []


def _error_of(message: Message) -> TriremeError | None:
    """Returns the error that an answer means; None for `busy`, which the caller handles."""
    said = decided(message.verdict) if isinstance(message, PushReply) else message
    if isinstance(said, RejectedVerdict):
        return Rejected(f"the parameter server rejected a push: {said.reason}")
    if isinstance(said, FencedVerdict):
        return Fenced(said.reason, said.view)
    if not isinstance(said, Refused) or said.code == "busy":
        return None
    if said.code == "fenced":
        return Fenced(said.reason, said.view)
    kinds: Mapping[str, type[TriremeError]] = {
        "mismatch": ModelMismatchError,
        "optimizer": UnsupportedOptimizerError,
    }
    return kinds.get(said.code, Rejected)(said.reason)

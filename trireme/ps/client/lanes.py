"""A client's requests to the servers: what is sent when, and which answer counts. Without I/O.

Events come in as method calls, each with the time it happens at; instructions go out as a list.
The client of a worker and the simulator drive this same object.

    event   what it is
    ask     servers are asked something; what was asked before is waited for no longer
    heard   a message has come from a server
    broke   a connection has failed, or could not be made
    tick    time passes; `due` says when that is of use

A request goes to a server once. What breaks on the way is sent again, with the same sequence
number, until there is an answer or it has taken too long. What was fenced off is sent again under
the newest view, with a number of its own, as long as this worker is in that view.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NoReturn

import msgspec

from trireme.cluster.view import ServerEntry, View
from trireme.errors import (
    Fenced,
    JobFailed,
    ModelMismatchError,
    Rejected,
    TriremeError,
    UnsupportedOptimizerError,
    WaitTimeout,
    WireError,
)
from trireme.ps.messages import (
    Applied,
    FencedVerdict,
    PushReply,
    Refused,
    RejectedVerdict,
    Waiting,
)
from trireme.wire.message import Message

__all__ = ["BACK_OFF", "Answer", "Instruction", "Lane", "Lanes", "Notice", "Request", "Transmit"]

BACK_OFF = 0.02
"""Seconds before a request that met another view, or a server out of reach, is sent again."""

_HURRIED_SECONDS = 3.0

Answer = tuple[Message, Sequence[Any]]
"""What a server has answered, and the payload that came with it."""


class Request(msgspec.Struct):
    """One server's share of what is asked: how to say it under a view, and with which payload."""

    build: Callable[[int], Message]
    payload: Sequence[Any] = ()


class Transmit(msgspec.Struct, frozen=True):
    """Send a message to a server, over a new connection where there is none; see `Lanes.entry`."""

    server: int
    sequence: int
    message: Message
    payload: Sequence[Any]


class Notice(msgspec.Struct, frozen=True):
    """Tell the worker's program why and for whom an answer is withheld."""

    waiting: Waiting


Instruction = Transmit | Notice


class Lane(msgspec.Struct, eq=False):
    """What is said to one server.

    Attributes:
        index: the server's.
        request: what waits for its answer.
        sequence: of the newest request.
        due: when it is sent again; never, as long as nothing went wrong.
        failing_since: since when the server has been out of reach.
        fenced: by which view, and why, the request was fenced off.
    """

    index: int
    request: Request | None = None
    sequence: int = 0
    due: float = math.inf
    failing_since: float | None = None
    fenced: tuple[int, str] | None = None


class Lanes:
    """One lane to each server.

    Args:
        worker, incarnation: who asks.
        servers: how many there are.
        retry_seconds: how long a server may be out of reach.
        patience_seconds: how long an answer may be withheld.
        hurries: whether a server that is out of reach is to be given up sooner.

    Attributes:
        incarnation: may be replaced while nothing is waited for.
        view: the newest that is known; whoever drives this keeps it so.
        lanes: by server.
        waiting: those whose answers are missing.
        answers: by server, to what was asked last.
    """

    def __init__(
        self,
        worker: int,
        incarnation: int,
        servers: int,
        *,
        retry_seconds: float,
        patience_seconds: float,
        hurries: Callable[[], bool] = lambda: False,
    ) -> None:
        self.incarnation = incarnation
        self.view: View | None = None
        self.lanes = [Lane(server) for server in range(servers)]
        self.waiting: list[Lane] = []
        self.answers: dict[int, Answer] = {}
        self._worker = worker
        self._retry_seconds = retry_seconds
        self._patience_seconds = patience_seconds
        self._hurries = hurries
        self._again = True
        self._since = 0.0
        self._names: Sequence[str] = ()

    # -- events -----------------------------------------------------------------------------------

    def ask(
        self,
        now: float,
        requests: Mapping[int, Request],
        *,
        again: bool = True,
        sent: Collection[int] = (),
    ) -> list[Instruction]:
        """Servers are asked something, in this order.

        Args:
            now: the time.
            requests: what is asked of each.
            again: whether what is fenced off is asked again; else that is an error.
            sent: who has its request already, under the number that `announce` gave.

        Raises:
            WaitTimeout: there is no view of the cluster yet.
        """
        if self.waiting:
            self._forget()
        self.answers = {}
        self._again = again
        self._since, self._names = now, ()
        out: list[Instruction] = []
        for server, request in requests.items():
            lane = self.lanes[server]
            lane.request = request
            self.waiting.append(lane)
            if server not in sent:
                lane.sequence += 1
                out.append(self._transmit(lane))
        return out

    def wait(self, now: float) -> None:
        """Somebody begins to wait for the answers: from now on their patience counts."""
        self._since = now

    def announce(self, server: int) -> int:
        """Returns the number of a request that is sent before it is asked."""
        lane = self.lanes[server]
        lane.sequence += 1
        return lane.sequence

    def heard(
        self, now: float, server: int, sequence: int, message: Message, payload: Sequence[Any]
    ) -> Sequence[Instruction]:
        """A message has come from a server, with the number of the request that it is about.

        Raises:
            Fenced: it was fenced off, and is not asked again.
            Rejected: the server found the request senseless.
            ModelMismatchError, UnsupportedOptimizerError: what a worker showed does not fit.
        """
        lane = self.lanes[server]
        lane.failing_since = None
        if sequence != lane.sequence or lane.request is None:
            return ()  # about an earlier request
        if type(message) is not PushReply or type(message.verdict) is not Applied:
            if isinstance(message, Waiting):
                self._names = message.names
                self._check_patience(now)
                return [Notice(message)]
            lane.fenced = _fence_of(message) if self._again else None
            if lane.fenced is not None:  # either side learns the newest view within moments
                lane.due = now + BACK_OFF
                return ()
            if (error := _error_of(message)) is not None:
                self._give_up(error)
        lane.request = None
        self.waiting.remove(lane)
        self.answers[server] = message, payload
        return ()

    def broke(self, now: float, server: int, error: WireError) -> None:
        """The connection to a server has failed, or could not be made: `due` says what follows.

        Raises:
            WireError: the server has been out of reach too long.
        """
        lane = self.lanes[server]
        if lane.request is None:
            return
        if lane.failing_since is None:
            lane.failing_since = lane.due = now
            return
        patience = self._retry_seconds
        if self._hurries():
            patience = min(patience, _HURRIED_SECONDS)
        if now - lane.failing_since > patience:
            lost = type(error)(
                f"worker:{self._worker} could not reach ps:{server} for {patience:.0f} s: {error}"
            )
            lost.server = f"ps:{server}"
            self._give_up(lost, error)
        lane.due = now + BACK_OFF

    def tick(self, now: float) -> list[Instruction]:
        """Time passes.

        Raises:
            Fenced: this worker was replaced, or taken out of the job.
            WaitTimeout: an answer was withheld too long; names those it was withheld for.
        """
        out: list[Instruction] = []
        for lane in self.waiting:
            if lane.due <= now:
                out.append(self._send_again(lane))
        self._check_patience(now)
        return out

    def _check_patience(self, now: float) -> None:
        if now - self._since > self._patience_seconds:
            self._give_up(self._impatient())

    @property
    def due(self) -> float:
        """When something is to be sent again: a `tick` is wanted then."""
        return min([lane.due for lane in self.waiting], default=math.inf)

    def entry(self, server: int) -> ServerEntry:
        """Returns where a server is to be connected to.

        Raises:
            JobFailed: it is not in the newest view.
        """
        for entry in self.known_view().servers:
            if entry.index == server:
                return entry
        raise JobFailed(f"ps:{server} is not part of the job any longer")

    def known_view(self) -> View:
        """Returns the newest view.

        Raises:
            WaitTimeout: there is none yet.
        """
        if self.view is None:
            raise WaitTimeout(f"worker:{self._worker} has no view of the cluster yet")
        return self.view

    # -- inside -----------------------------------------------------------------------------------

    def _transmit(self, lane: Lane) -> Transmit:
        assert lane.request is not None
        message = lane.request.build(self.known_view().number)
        return Transmit(lane.index, lane.sequence, message, lane.request.payload)

    def _send_again(self, lane: Lane) -> Transmit:
        lane.due = math.inf
        if lane.fenced is not None:
            self._check_membership(*lane.fenced)
            lane.fenced = None
            lane.sequence += 1
        return self._transmit(lane)

    def _check_membership(self, number: int, reason: str) -> None:
        """Finds out whether this worker is still in the job, once another view fenced it off."""
        view = self.known_view()
        known = {(entry.index, entry.incarnation) for entry in view.workers}
        if (self._worker, self.incarnation) not in known and view.number >= number:
            said = (
                f"worker:{self._worker} is no longer part of the job ({reason}): it was taken for "
                "lost, or another process took its place"
            )
            self._give_up(Fenced(said, number))

    def _impatient(self) -> WaitTimeout:
        said = f"worker:{self._worker} waited {self._patience_seconds:.0f} s for an answer"
        if self._names:
            names = ", ".join(self._names)
            return WaitTimeout(
                f"{said} that was withheld until {names} had pushed: see whether it still runs"
            )
        silent = [f"ps:{e.index} at {e.address}" for e in map(self._entry_of, self.waiting)]
        return WaitTimeout(
            f"{said} of {', '.join(silent)}, which said nothing: see whether it still runs"
        )

    def _entry_of(self, lane: Lane) -> ServerEntry:
        return self.entry(lane.index)

    def _give_up(self, error: TriremeError, cause: Exception | None = None) -> NoReturn:
        """Waits for no answer any longer: what was asked ends with an error."""
        self._forget()
        raise error from cause

    def _forget(self) -> None:
        for lane in self.waiting:
            lane.request = lane.fenced = None
            lane.due = math.inf
        self.waiting = []


def _fence_of(message: Message) -> tuple[int, str] | None:
    """Returns which view has fenced a request off, and why; None for any other answer."""
    if isinstance(message, PushReply) and isinstance(message.verdict, FencedVerdict):
        return message.verdict.view, message.verdict.reason
    if isinstance(message, Refused) and message.code == "fenced":
        return message.view, message.reason
    return None


def _error_of(message: Message) -> TriremeError | None:
    """Returns what a refusal means; `busy` is left to who asked."""
    if isinstance(message, PushReply) and isinstance(message.verdict, RejectedVerdict):
        return Rejected(f"the parameter server rejected a push: {message.verdict.reason}")
    fence = _fence_of(message)
    if fence is not None:
        return Fenced(fence[1], fence[0])
    if not isinstance(message, Refused) or message.code == "busy":
        return None
    kinds: Mapping[str, type[TriremeError]] = {
        "mismatch": ModelMismatchError,
        "optimizer": UnsupportedOptimizerError,
    }
    return kinds.get(message.code, Rejected)(message.reason)

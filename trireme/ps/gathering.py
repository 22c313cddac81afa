"""Which updates of a host's workers go to the server as one. Pure: events in, instructions out.

An update is held until those of all workers of the host are there, or one has kept the others
waiting too long; then all that are there go as one sum. The first ones are held until the server
can be reached, too: the connection to it is made when the first worker comes. Nothing here makes
sure that an update counts once: the server does. Whatever goes wrong, a worker is told to push by
itself; there the update counts if it has not done so as part of a sum.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from trireme.ps.dense import PartBuffer
from trireme.ps.instructions import Reply
from trireme.ps.messages import Push, PushedTogether, PushReply, Refused, Waiting
from trireme.ps.values import Contribution, sum_of

__all__ = ["NOTICE_SECONDS", "PATIENCE_SECONDS", "Gathering", "SendSum"]

PATIENCE_SECONDS = 2.0
"""So long the others of a host wait for one; then its update goes in a sum of its own."""

NOTICE_SECONDS = 5.0
"""How often a worker whose answer is not there is told so: it hears that this process lives."""


@dataclass(frozen=True, slots=True)
class SendSum:
    """Send a sum to the server.

    Attributes:
        number: by which its answer is known.
        pushes: of what it is the sum, by worker.
        total: the sum; may be overwritten by the next event.
    """

    number: int
    pushes: tuple[Push, ...]
    total: PartBuffer


Instruction = Reply | SendSum

_UNCONNECTED = "the aggregator has no connection to the server"


@dataclass(slots=True)
class _Held:
    """An update whose worker has no answer."""

    push: Push
    gradients: PartBuffer
    route: object
    since: float


@dataclass(slots=True)
class _Sent:
    """A sum that the server has not answered."""

    parts: dict[int, _Held]
    notice: Waiting = field(default_factory=lambda: Waiting("the server's answer", ("ps:0",), 0.0))


class Gathering:
    """The workers of one host, and their updates on the way.

    Args:
        spare: gives the memory for a sum; asked only when one is needed.
        patience: seconds that the others wait for one.

    Attributes:
        connected: whether the server can be reached.
        sums: how many were sent.
        summed: of how many updates.
    """

    def __init__(
        self, spare: Callable[[], PartBuffer], *, patience: float = PATIENCE_SECONDS
    ) -> None:
        self.connected = False
        self.sums = 0
        self.summed = 0
        self._spare = spare
        self._patience = patience
        self._awaited: dict[int, bool] = {}  # by worker of this host; who was late is not
        self._here: dict[int, _Held] = {}
        self._sent: dict[int, _Sent] = {}
        self._noticed = 0.0
        self._beginning = True  # the first connection to the server is being made

    @property
    def workers(self) -> Sequence[int]:
        """The workers that push here."""
        return tuple(self._awaited)

    # -- from workers ---------------------------------------------------------------------------

    def enlist(self, worker: int) -> None:
        """A worker will push here."""
        self._awaited[worker] = True

    def leave(self, worker: int) -> list[Instruction]:
        """A worker will push here no more, or has died; nobody waits for it."""
        self._awaited.pop(worker, None)
        self._here.pop(worker, None)
        for sent in self._sent.values():
            sent.parts.pop(worker, None)
        return self._send_complete()

    def push(
        self, now: float, route: object, push: Push, gradients: PartBuffer
    ) -> list[Instruction]:
        """A worker's update. `gradients` must stay as they are until it is answered."""
        if not self.connected and not self._beginning:
            return [_apart(route, _UNCONNECTED)]
        self._awaited[push.worker] = True
        self._here[push.worker] = _Held(push, gradients, route, now)
        return self._send_complete()

    def tick(self, now: float) -> list[Instruction]:
        """Waits no longer than it should; tells those who wait."""
        out: list[Instruction] = []
        late = self._here and now - min(h.since for h in self._here.values()) >= self._patience
        if late and not self.connected:
            self._beginning = False
            out += _all_apart(_Sent(self._here), _UNCONNECTED)
            self._here = {}
        elif late:
            for worker in self._awaited.keys() - self._here.keys():
                self._awaited[worker] = False
            out += self._send_complete()
        if now - self._noticed >= NOTICE_SECONDS:
            self._noticed = now
            out += self._notices(now)
        return out

    # -- from the server ------------------------------------------------------------------------

    def answered(
        self, number: int, message: PushedTogether, values: Sequence[torch.Tensor]
    ) -> list[Instruction]:
        """A sum is decided. Who is not spoken of has asked by itself, and is answered there."""
        sent = self._sent.pop(number, None)
        if sent is None:
            return []
        out: list[Instruction] = []
        for answer in message.answers:
            held = sent.parts.pop(answer.worker, None)
            if held is not None:
                reply = PushReply(answer.verdict, message.step, answer.staleness, answer.stop)
                out.append(Reply(held.route, reply, values if held.push.pull else ()))
        return [*out, *_all_apart(sent, "the server does not speak of it")]

    def refused(self, number: int, message: Refused) -> list[Instruction]:
        """A sum was refused, or taken back."""
        sent = self._sent.pop(number, None)
        return [] if sent is None else _all_apart(sent, message.reason)

    def waiting(self, number: int, message: Waiting) -> None:
        """The server says for whom a sum waits."""
        if number in self._sent:
            self._sent[number].notice = message

    def connect(self) -> list[Instruction]:
        """The server can be reached from now on."""
        self.connected, self._beginning = True, False
        return self._send_complete()

    def disconnect(self) -> list[Instruction]:
        """The server is out of reach; what became of the sums under way is not known."""
        self.connected = False
        under_way = [*self._sent.values(), _Sent(self._here)]
        self._sent, self._here = {}, {}
        reason = "the aggregator has lost its connection to the server"
        return [reply for sent in under_way for reply in _all_apart(sent, reason)]

    # -- inside ---------------------------------------------------------------------------------

    def _send_complete(self) -> list[Instruction]:
        """Sends what is here, if nobody is waited for any longer."""
        if not self.connected or not self._here:
            return []
        if any(awaited and w not in self._here for w, awaited in self._awaited.items()):
            return []
        parts, self._here = dict(sorted(self._here.items())), {}
        self.sums += 1
        self.summed += len(parts)
        self._sent[self.sums] = _Sent(parts)
        return [SendSum(self.sums, tuple(h.push for h in parts.values()), self._sum(parts))]

    def _sum(self, parts: dict[int, _Held]) -> PartBuffer:
        """Returns the sum; where nothing weighs anything, some gradient: nobody looks at it."""
        alone = [Contribution((held.push.weight,), held.gradients) for held in parts.values()]
        weighty = [each for each in alone if each.weighty]
        if len(weighty) > 1:
            return sum_of(weighty, self._spare())
        return (weighty or alone)[0].gradients

    def _notices(self, now: float) -> list[Instruction]:
        late = tuple(
            f"worker:{worker}"
            for worker, awaited in sorted(self._awaited.items())
            if awaited and worker not in self._here
        )
        out: list[Instruction] = [
            Reply(held.route, Waiting("the updates of this host", late, now - held.since))
            for held in self._here.values()
        ]
        for sent in self._sent.values():
            reason, names = sent.notice.reason, sent.notice.names
            out += [
                Reply(held.route, Waiting(reason, names, now - held.since))
                for held in sent.parts.values()
            ]
        return out


def _all_apart(sent: _Sent, reason: str) -> list[Instruction]:
    return [_apart(held.route, reason) for held in sent.parts.values()]


def _apart(route: object, reason: str) -> Reply:
    return Reply(route, Refused("apart", reason, 0))

"""A task's connections to all servers: the rules of `trireme.ps.client`, under virtual time.

A request goes to all servers at once and each answers it. What breaks is sent again, with the same
sequence number; what was fenced off is sent again under the newest view, as long as this task is
in it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from trireme.cluster.view import View
from trireme.ps.messages import FencedVerdict, PushReply, Refused, Waiting
from trireme.simulate.loop import Start
from trireme.simulate.network import UP, Network, Wire
from trireme.simulate.server import Route, Server
from trireme.wire.message import Message

__all__ = ["Answer", "Client", "Lane", "Request"]

_BACK_OFF = 0.05

Answer = tuple[Message, Sequence[torch.Tensor]]
"""A server's answer and its payload."""


@dataclass(frozen=True, slots=True)
class Request:
    """What is asked of one server.

    Attributes:
        build: the message, given the number of the newest view.
        payload: what goes with it: tensors, or a load's specs and tensors.
        again: whether to ask again under the newest view when it was fenced off.
    """

    build: Callable[[int], Message]
    payload: Sequence[Any] = ()
    again: bool = True


class Client:
    """One process's connections.

    Args:
        name: the process, such as `worker:1.2` for the second start of worker 1.
        network: what carries the messages.
        servers: whom to talk to.
        view: tells the newest view that the process has heard of.
        fenced: told a server's view number when it fenced the process off; returns whether the
            process still takes part.
    """

    def __init__(
        self,
        name: str,
        network: Network,
        servers: Sequence[Server],
        view: Callable[[], View],
        fenced: Callable[[int], bool] = lambda number: True,
    ) -> None:
        self.name = name
        self.network = network
        self.view = view
        self.fenced = fenced
        self.closed = False
        self.lanes = [Lane(self, server) for server in servers]

    def ask(self, requests: Mapping[int, Request]) -> Start:
        """Returns what a process yields to get `{server: answer}`, sent in the given order.

        A request that is not asked again and meets a fence ends the whole: as the error that it is
        in `trireme.ps.client`. What the other servers answer then comes late, and to nobody.
        """

        def begin(resume: Callable[[Any], None]) -> None:
            answers: dict[int, Answer] = {}

            def note(server: int, answer: Answer) -> None:
                answers[server] = answer
                ends = not requests[server].again and _fenced_at(answer[0]) is not None
                if ends:
                    for other in requests:
                        self.lanes[other].request = None
                if ends or len(answers) == len(requests):
                    resume(answers)

            for server, request in requests.items():
                self.lanes[server].start(request, partial(note, server))

        return begin

    def retry(self, lane: Lane) -> None:
        """Sends a lane's request again."""
        lane.send()

    def close(self) -> None:
        """Ends all connections, as the end of a process does."""
        self.closed = True
        for lane in self.lanes:
            if lane.wire is not None:
                lane.wire.close()


class Lane:
    """The connection to one server, and the request that waits for its answer."""

    def __init__(self, client: Client, server: Server) -> None:
        self.wire: Wire | None = None
        self.request: Request | None = None
        self._client = client
        self._server = server
        self._sequence = 0
        self._done: Callable[[Answer], None] = lambda answer: None

    def start(self, request: Request, done: Callable[[Answer], None]) -> None:
        """Sends a request; `done` is told the answer."""
        self.request, self._done = request, done
        self._sequence += 1
        self.send()

    def send(self) -> None:
        """Sends the request under the newest view, over a new connection where none is left."""
        if self.request is None or self._client.closed:
            return
        if self.wire is None:
            self.wire = self._client.network.wire(self._broke)
        message = self.request.build(self._client.view().number)
        route = Route(self._client.name, self.wire, self._sequence, message, self._hear)
        payload = self.request.payload
        self.wire.carry(UP, lambda: self._server.receive(route, payload))

    def _broke(self) -> None:
        self.wire = None
        if not self._client.closed and self.request is not None:
            self._client.retry(self)

    def _hear(self, route: Route, message: Message, payload: Sequence[torch.Tensor]) -> None:
        current = route.wire is self.wire and route.sequence == self._sequence
        if not current or self.request is None or isinstance(message, Waiting):
            return
        number = _fenced_at(message)
        if number is not None and self.request.again:
            if self._client.fenced(number) and not self._client.closed:
                self._sequence += 1
                self._client.network.loop.after(_BACK_OFF, partial(self._client.retry, self))
            return
        self.request = None
        self._done((message, payload))


def _fenced_at(message: Message) -> int | None:
    """Returns the view of a server that fenced a request off; None for any other answer."""
    if isinstance(message, PushReply) and isinstance(message.verdict, FencedVerdict):
        return message.verdict.view
    if isinstance(message, Refused) and message.code == "fenced":
        return message.view
    return None

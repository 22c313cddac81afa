"""Sends a push while backward runs.

Backward computes the last layer's gradient first. Each chunk of the gradients is sent as soon as
all its parameters have theirs, so that little is left to send after backward. The last chunk is
held back until all gradients are known to be final: before that no server has the whole push.

It gains where the network is slower than the model: 9% of a step at 10 Gbit/s from 8 MB on, 6 to
10% at 1 Gbit/s, nothing over loopback (decision 0009, benchmarks/results/overlap.md).
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

import msgspec
from torch.utils.hooks import RemovableHandle

from trireme.ps.client.protocol import ClientProtocol
from trireme.ps.client.server_links import ServerLink, ServerLinks
from trireme.ps.flat import FlatModel, PartBuffer
from trireme.ps.layout import Chunk
from trireme.ps.messages import Push
from trireme.wire.background_sender import BackgroundSender

_log = logging.getLogger(__name__)

_MOST_MISMATCHES = 3  # a layer that is never used makes one, and one that is frozen later another


class Overlap:
    """Sends a worker's gradients while they are computed, one push at a time.

    Args:
        flat: the model, whose gradients are watched from the first push on.
        gradients: each server's part of the gradients.
        protocol: makes the messages, and knows which push was announced.
        servers: the connections, which nobody else uses while a push is under way here.

    Attributes:
        ruled_out: why this model's pushes cannot leave early; empty while they can.
    """

    def __init__(
        self,
        flat: FlatModel,
        gradients: Sequence[PartBuffer],
        protocol: ClientProtocol,
        servers: ServerLinks,
    ) -> None:
        self.ruled_out = ""
        self._flat = flat
        self._gradients = gradients
        self._protocol = protocol
        self._servers = servers
        self._outlets: list[_Outlet] = []  # by server
        # For each parameter: the outlets and chunks that wait for its gradient.
        self._waiting: list[list[tuple[_Outlet, int]]] = [[] for _ in flat.parameters]
        self._sender: BackgroundSender | None = None
        self._open: list[ServerLink] = []
        self._seen: set[int] = set()
        self._writes = self._flat_writes = 0
        self._mismatches = 0
        self._invalid = ""
        self._handles: list[RemovableHandle] = []

    def begin(self, push: Push) -> None:
        """Announces a push to the servers that it can leave to early; to none if it is ruled out.

        The gradients are zero, and backward comes next.
        """
        links = [link for link in self._servers.links if self._leaves_early(link)]
        if self.ruled_out or not links:
            return
        if not self._handles:
            self._watch()
        self._protocol.announced = push
        self._invalid = "" if self._flat.watched_alone else "another hook may change gradients"
        self._writes, self._flat_writes = self._flat.gradient_writes, self._flat.flat_writes
        self._seen.clear()
        self._open = []
        lanes, connections = self._servers.lanes, []
        view = lanes.known_view().number
        for link in links:
            assert link.connection is not None
            outlet, sequence = self._outlets[link.index], lanes.announce(link.index)
            message = msgspec.structs.replace(
                self._protocol.message(push, link.index), view=view, order=tuple(outlet.order)
            )
            link.connection.begin(message, outlet.nbytes, sequence=sequence)
            outlet.open(len(self._open))
            self._open.append(link)
            connections.append(link.connection)
        self._sender = BackgroundSender(connections)

    def _leaves_early(self, link: ServerLink) -> bool:
        """Returns whether a push can leave early over this link."""
        connection = link.connection
        if connection is None or connection.lending is not None or connection.unsent:
            return False
        return len(self._flat.layout.chunks(link.index)) > 1

    def _watch(self) -> None:
        """Watches the gradients; prepares what is sent of them."""
        if not self._outlets:
            for server, part in enumerate(self._gradients):
                outlet = _Outlet(self._flat.layout.chunks(server), part.chunk_views)
                self._outlets.append(outlet)
                for index, chunk in enumerate(outlet.chunks):
                    for position in chunk.parameters:
                        self._waiting[position].append((outlet, index))
        self._handles = self._flat.watch_gradients(self._final)

    def complete(self, push: Push) -> Sequence[int]:
        """Completes what was announced, if it is this push; returns the servers that have it."""
        announced = self._protocol.announced
        if announced is None:
            return ()
        if self._protocol.completes(push):
            return self.finish()
        if announced.absent != push.absent:
            self.note_mismatch()
        self.abandon()
        return ()

    def finish(self) -> list[int]:
        """Completes the push, after backward.

        Returns:
            The servers that have the push. The connections to the others are closed: they broke, or
            the gradients may have changed after they were sent.
        """
        sender = self._sender
        assert sender is not None
        if self._changed():
            self._rule_out(self._invalid)
            self.abandon()
            return []
        for link in self._open:
            outlet = self._outlets[link.index]
            sender.give(outlet.place, outlet.rest())
        failures = sender.finish(
            self._servers.options.retry_seconds,
            lambda place: self._servers.is_replaced(self._open[place]),
        )
        self._sender = None
        sent: list[int] = []
        for link, failure in zip(self._open, failures, strict=True):
            self._outlets[link.index].learn()
            if failure is not None:
                _log.debug("an early push to ps:%d failed: %s", link.index, failure)
            assert link.connection is not None
            if failure is None and not link.connection.in_frame:
                sent.append(link.index)
            else:
                link.close()
        return sent

    def _changed(self) -> bool:
        """Returns whether gradients may have been changed after they were sent."""
        flat = self._flat
        if flat.gradient_writes != self._writes or not flat.gradients_in_place:
            self._invalid = self._invalid or "gradients were changed after backward had made them"
        return bool(self._invalid)

    def note_mismatch(self) -> None:
        """Notes that other parameters have gradients than announced; rules that out if it recurs.

        A push announces them before backward: those of the push before.
        """
        self._mismatches += 1
        if self._changed():
            self._rule_out(self._invalid)
        elif self._mismatches >= _MOST_MISMATCHES:
            self._rule_out("which parameters have a gradient changes from step to step")

    def abandon(self) -> None:
        """Gives up a push that was announced and not made: no server has all of it."""
        self._protocol.announced = None
        if self._sender is None:
            return
        self._sender.stop()
        self._sender = None
        for link in self._open:
            self._outlets[link.index].place = -1
            link.close()

    def close(self) -> None:
        """Gives up the push under way, as `abandon`, and stops watching the gradients."""
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self.abandon()

    def lay_out(self, gradients: Sequence[PartBuffer]) -> None:
        """Sends other parts of the gradients from now on, as the shards were divided anew.

        Args:
            gradients: the parts, by shard.
        """
        self.close()
        self._gradients, self._outlets = gradients, []
        self._waiting = [[] for _ in self._flat.parameters]
        self._open = []

    def _final(self, position: int) -> None:
        """Sends what is final, as autograd has accumulated a parameter's gradient."""
        if self._sender is None or self._invalid:
            return
        self._writes += 1
        if position in self._seen:
            self._invalid = "backward makes the gradient of a parameter in several parts"
        elif not self._flat.gradient_in_place(position):
            self._invalid = "a gradient is not where it is sent from"
        elif self._flat.flat_writes != self._flat_writes:
            self._invalid = "something besides backward writes to gradients"
        if self._invalid:
            return
        self._seen.add(position)
        for outlet, chunk in self._waiting[position]:
            if outlet.place >= 0 and (ready := outlet.finalise(chunk)):
                self._sender.give(outlet.place, ready)

    def _rule_out(self, reason: str) -> None:
        self.ruled_out = reason
        _log.info("pushes leave after backward from now on, not while it runs: %s", reason)


class _Outlet:
    """The chunks of a push to one server, and which of them are final.

    Attributes:
        order: the order in which they are sent: at first from the last layer to the first, then the
            order in which they became final in the push before.
        place: the position of this server among those of the push; -1 while there is no push.
    """

    def __init__(self, chunks: Sequence[Chunk], views: Sequence[memoryview]) -> None:
        self.chunks = chunks
        self.order = list(reversed(range(len(chunks))))
        self.nbytes = sum(view.nbytes for view in views)
        self.place = -1
        self._views = views
        self._missing: list[int] = []  # for each chunk, how many gradients
        self._finals: list[int] = []  # in the order in which they became so
        self._sent = 0

    def open(self, place: int) -> None:
        """Begins a push: no chunk is final."""
        self.place = place
        self._missing = [len(chunk.parameters) for chunk in self.chunks]
        self._finals = []
        self._sent = 0

    def finalise(self, chunk: int) -> list[memoryview]:
        """Notes that one more gradient of a chunk is final; returns what can be sent now."""
        self._missing[chunk] -= 1
        if self._missing[chunk]:
            return []
        self._finals.append(chunk)
        begin, most = self._sent, len(self.order) - 1
        while self._sent < most and self._missing[self.order[self._sent]] == 0:
            self._sent += 1
        return [self._views[index] for index in self.order[begin : self._sent]]

    def rest(self) -> list[memoryview]:
        """Returns all that was not sent."""
        begin, self._sent = self._sent, len(self.order)
        return [self._views[index] for index in self.order[begin:]]

    def learn(self) -> None:
        """Ends a push that was sent, and takes the order in which its chunks became final."""
        self.place = -1
        known = set(self._finals)
        self.order = self._finals + [index for index in self.order if index not in known]

"""Receive buffers: memory for pushed gradients, the server's own or lent by workers of its host.

A server has as many of its own as pushes are under way, not as many as workers.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from trireme.errors import FrameError, WireError
from trireme.ps.flat import PartBuffer, dtype_of
from trireme.ps.layout import Layout
from trireme.ps.lending_messages import LendMemory
from trireme.ps.messages import Pairs
from trireme.ps.packing import PACKING, Packed
from trireme.ps.shard.state import ShardState
from trireme.wire.service import Link
from trireme.wire.shared_memory import SharedMemory
from trireme.wire.transport import local_memory

_log = logging.getLogger(__name__)


_Memory = tuple[PartBuffer, Packed | None]


@dataclass(slots=True)
class Staging:
    """The receive buffer of one push."""

    gradients: PartBuffer  # the gradients that the shard takes
    views: Sequence[memoryview]  # the memory that receives them
    # unpacks what was received into `gradients`; None where that is the same memory
    packed: Packed | None = None
    busy: bool = False  # whether the shard still needs the gradients
    # the memory that later pushes use; None where this memory is not for all
    pool: list[_Memory] | None = None

    def release(self) -> None:
        """Notes that nobody reads the gradients any more. The next push may use their memory."""
        self.busy = False
        if self.pool is not None:
            self.pool.append((self.gradients, self.packed))
            self.pool = None  # another push has its own `Staging`, which this one does not release


class ReceiveBuffer:
    """The receive buffers of one server, for the pushes of all workers."""

    def __init__(self, state: ShardState) -> None:
        self._state = state
        self._shard = state.number
        self._pool: list[_Memory] = []  # the memory that was used last is the last

    def place(self, link: Link, length: int) -> Sequence[memoryview]:
        """Returns memory for a gradient, which nobody else uses."""
        layout, task = self._known(link), link.identity.task
        if self._pool:
            gradients, packed = self._pool.pop()
            staging = Staging(gradients, (), packed)
        else:
            staging = _new_staging(self._state, layout, task)
        staging.pool, link.context = self._pool, staging
        return _placed(staging, length, task)

    def take(self, link: Link, payload: Sequence[memoryview]) -> Staging:
        """Returns the gradient that has come, and marks its memory as busy."""
        if not payload:  # a part without elements has none
            self.place(link, 0)
            payload = link.context.views
        staging = link.context
        if not isinstance(staging, Staging) or staging.views is not payload:
            lending = link.connection.lending
            if lending is None or payload is not lending.incoming:
                raise FrameError(f"{link.identity.task} pushed without a payload")
            staging = link.context = Staging(self._lent_buffer(link, payload), payload)
        elif staging.pool is not None:
            link.context = None  # the push has it now, and the link's next one another
        staging.busy = True
        if staging.packed is not None:
            staging.packed.unpack()
        return staging

    def trim(self) -> None:
        """Frees the memory of one push, if it is not used: a worker's connection is gone."""
        del self._pool[:1]

    def borrow(self, link: Link, message: LendMemory) -> SharedMemory | None:
        """Maps memory that a worker of this host lends; returns None if it cannot be used."""
        local, stream = local_memory(), link.connection.stream
        if local is None or (descriptor := stream.take_descriptor()) is None:
            return None
        try:
            memory = local.attach(descriptor, message.nbytes)
            memory.close()  # the mapping stays while a view of it exists
            outbound, inbound = memory.places(message.outbound), memory.places(message.inbound)
        except WireError as error:
            _log.warning("%s lends memory that cannot be used: %s", link.identity.task, error)
            return None
        link.connection.lending = local.lend(outbound, inbound, borrowed=True)
        if message.extra:
            stream.expect_descriptor()
        return memory

    def _known(self, link: Link) -> Layout:
        layout = self._state.layout
        if layout is None:
            raise FrameError(f"{link.identity.task} pushed before it showed its model")
        return layout

    def _lent_buffer(self, link: Link, payload: Sequence[memoryview]) -> PartBuffer:
        return _lent_buffer(self._known(link), self._shard, payload, link.identity.task)


class EntryBuffers:
    """The receive buffers of a backup: of pushes that come from the primary, not from workers."""

    def __init__(self, state: ShardState) -> None:
        self._state = state
        self._all: list[Staging] = []
        self._lent: dict[tuple[int, Pairs], Staging] = {}  # by memory and places
        self._next: Staging | None = None  # the one that is being received into

    def place(self, length: int) -> Sequence[memoryview]:
        """Returns memory for the gradient of an entry, which nobody else uses."""
        staging = next((each for each in self._all if not each.busy), None)
        if staging is None:
            layout = self._state.layout
            if layout is None:
                raise FrameError("the primary replicated a push before it had a model")
            staging = _new_staging(self._state, layout, "the primary")
            self._all.append(staging)
        self._next = staging
        return _placed(staging, length, "the primary")

    def take(self, payload: Sequence[memoryview]) -> Staging:
        """Returns the gradient that has come, and marks its memory as busy."""
        staging, self._next = self._next, None
        if staging is None or staging.views is not payload:
            if payload or staging is not None:
                raise FrameError("the primary replicated a push without its gradient")
            staging = self._empty()
        staging.busy = True
        if staging.packed is not None:
            staging.packed.unpack()
        return staging

    def named(self, memory: SharedMemory, places: Pairs) -> Staging:
        """Returns the gradient that lies at places of lent memory, and marks it as busy."""
        staging = self._lent.get((memory.identity, places))
        if staging is None or staging.busy:
            layout = self._state.layout
            if layout is None:
                raise FrameError("the primary replicated a push before it had a model")
            try:
                views = memory.places(places)
            except WireError as error:
                raise FrameError(str(error)) from error
            gradients = _lent_buffer(layout, self._state.number, views, "the primary")
            staging = self._lent[memory.identity, places] = Staging(gradients, views)
        staging.busy = True
        return staging

    def forget(self, memory: int) -> None:
        """Lets go of memory that is not lent any more."""
        self._lent = {key: staging for key, staging in self._lent.items() if key[0] != memory}

    def _empty(self) -> Staging:
        """Returns the gradient of a part without elements, which has no payload."""
        self.place(0)
        staging, self._next = self._next, None
        assert staging is not None
        return staging


class Buffers:
    """All receive buffers of one replica."""

    def __init__(self, state: ShardState) -> None:
        self.received = ReceiveBuffer(state)
        self.entries = EntryBuffers(state)


def _new_staging(state: ShardState, layout: Layout, task: str) -> Staging:
    """Returns new memory for the gradients of a shard."""
    try:
        gradients = PartBuffer(layout, state.number)
    except RuntimeError as error:
        raise FrameError(f"no memory for a push of {task}: {error}") from error
    codec, packed = state.rule.codec, None
    if codec != "none":
        packed = PACKING.load("codecs").packed(codec, gradients, state.rule.deflates)
    return Staging(gradients, (), packed)


def _lent_buffer(
    layout: Layout, shard: int, payload: Sequence[memoryview], task: str
) -> PartBuffer:
    """Returns gradients that lie in lent memory."""
    parts = layout.parts(shard)
    if [view.nbytes for view in payload] != [part.bytes for part in parts if part.length]:
        raise FrameError(f"{task} lent memory of other sizes than its model's")
    views = iter(payload)
    vectors = [
        torch.frombuffer(next(views), dtype=dtype_of(part.vector.dtype))
        if part.length
        else torch.empty(0, dtype=dtype_of(part.vector.dtype))
        for part in parts
    ]
    return PartBuffer(layout, shard, vectors)


def _placed(staging: Staging, length: int, task: str) -> Sequence[memoryview]:
    """Returns the memory that receives a gradient of a length."""
    packed = staging.packed
    expected = (packed or staging.gradients).nbytes
    if length != expected and (packed is None or not packed.fits(length)):
        raise FrameError(f"{task} pushed {length} bytes where this server's part has {expected}")
    staging.views = staging.gradients.views if packed is None else packed.place(length)
    return staging.views

"""Receive buffers: memory for pushed gradients, the server's own or lent by workers of its host.

A server has as many of its own as pushes are under way, not as many as workers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from trireme.errors import FrameError, WireError
from trireme.ps.flat import PartBuffer, dtype_of
from trireme.ps.layout import Layout
from trireme.ps.messages import Pairs
from trireme.ps.packing import PACKING, Packed
from trireme.ps.shard.state import ShardState
from trireme.wire.service import Link
from trireme.wire.shared_memory import SharedMemory

_Memory = tuple[PartBuffer, Packed | None]


@dataclass(slots=True)
class Staging:
    """The receive buffer of one push."""

    gradients: PartBuffer  # the gradients that the shard takes
    views: Sequence[memoryview]  # the memory that receives them
    # unpacks what was received into `gradients`; None where that is the same memory
    packed: Packed | None = None
    # the memory that later pushes use; None where this memory is not for all
    pool: list[_Memory] | None = None

    def release(self) -> None:
        """Notes that nobody reads the gradients any more. The next push may use their memory."""
        if self.pool is not None:
            self.pool.append((self.gradients, self.packed))
            self.pool = None  # another push has its own `Staging`, which this one does not release


class ReceiveBuffer:
    """The receive buffers of one replica: for pushes of workers, or for entries of its primary."""

    def __init__(self, state: ShardState) -> None:
        self._state = state
        self._pool: list[_Memory] = []  # the memory that was used last is the last
        # where a primary names lent memory: by its identity and the places there
        self._named: dict[tuple[int, Pairs], Staging] = {}

    def place(self, link: Link, length: int, worker: int) -> Sequence[memoryview]:
        """Returns memory for a gradient of a worker, which nobody else uses."""
        task, layout = link.identity.task, self._layout(link, worker)
        found = (i for i in reversed(range(len(self._pool))) if self._pool[i][0].layout is layout)
        at = next(found, None)
        gradients, packed = self._new(layout, task) if at is None else self._pool.pop(at)
        expected = (packed or gradients).nbytes
        if length != expected and (packed is None or not packed.fits(length)):
            raise FrameError(
                f"{task} pushed {length} bytes where this server's part has {expected}"
            )
        views = gradients.views if packed is None else packed.place(length)
        link.context = Staging(gradients, views, packed, self._pool)
        return views

    def take(self, link: Link, payload: Sequence[memoryview], worker: int) -> Staging:
        """Returns the gradient of a worker that has come."""
        if not payload:  # a part without elements has none
            self.place(link, 0, worker)
            payload = link.context.views
        staging = link.context
        if not isinstance(staging, Staging) or staging.views is not payload:
            lending = link.connection.lending
            if lending is None or payload is not lending.incoming:
                raise FrameError(f"{link.identity.task} pushed without a payload")
            staging = link.context = Staging(self._lent(payload, link, worker), payload)
        elif staging.pool is not None:
            link.context = None  # the push has it now, and the link's next one another
        if staging.packed is not None:
            staging.packed.unpack()
        return staging

    def named(self, link: Link, memory: SharedMemory, places: Pairs, worker: int) -> Staging:
        """Returns the gradient that lies at places of lent memory, which a primary names."""
        staging = self._named.get((memory.identity, places))
        if staging is None:
            try:
                views = memory.places(places)
            except WireError as error:
                raise FrameError(str(error)) from error
            staging = Staging(self._lent(views, link, worker), views)
            self._named[memory.identity, places] = staging
        return staging

    def forget(self, memory: int) -> None:
        """Lets go of memory that is not lent any more."""
        self._named = {key: staging for key, staging in self._named.items() if key[0] != memory}

    def trim(self) -> None:
        """Frees the memory of one push, if it is not used: a worker's connection is gone."""
        del self._pool[:1]

    def _new(self, layout: Layout, task: str) -> _Memory:
        rule, packed = self._state.rule, None
        try:
            gradients = PartBuffer(layout, self._state.number)
        except RuntimeError as error:
            raise FrameError(f"no memory for a push of {task}: {error}") from error
        if rule.codec != "none":
            packed = PACKING.load("codecs").packed(rule.codec, gradients, rule.deflates)
        return gradients, packed

    def _lent(self, payload: Sequence[memoryview], link: Link, worker: int) -> PartBuffer:
        layout, task = self._layout(link, worker), link.identity.task
        parts = layout.parts(self._state.number)
        if [view.nbytes for view in payload] != [part.bytes for part in parts if part.length]:
            raise FrameError(f"{task} lent memory of other sizes than its model's")
        views = iter(payload)
        vectors = [
            torch.frombuffer(next(views), dtype=dtype_of(part.vector.dtype))
            if part.length
            else torch.empty(0, dtype=dtype_of(part.vector.dtype))
            for part in parts
        ]
        return PartBuffer(layout, self._state.number, vectors)

    def _layout(self, link: Link, worker: int) -> Layout:
        layout = self._state.layout_of(worker)
        if layout is None:
            raise FrameError(f"{link.identity.task} pushed before it showed its model")
        return layout

"""Sends and receives the messages of a plan with torch.distributed, point to point."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
import torch.distributed as dist

from trireme.graph.execute.plan import Event, Message

_NONE = 0x7FFD
"""A gradient that does not exist is sent as numbers of these bits in each 16: NaNs of any floating
dtype, and none that arithmetic makes. So gradients that exist take no further bytes or messages."""


@dataclass(frozen=True)
class TaskDevice:
    """A device of a task, where segments are computed."""

    rank: int  # of the task in `torch.distributed`, in the default group
    device: torch.device


Route: TypeAlias = Mapping[Message, tuple[int, int]]
"""The tag of each message of a plan, and the position of the event that receives it."""


def route(events: Sequence[Event]) -> Route:
    """Returns the route of the messages of a plan, equal at all tasks."""
    consumers = {each: position for position, event in enumerate(events) for each in event.receives}
    sent = [message for event in events for message in event.sends]
    return {message: (tag, consumers[message]) for tag, message in enumerate(sent)}


class Transfers:
    """The messages of one batch at one task.

    The process group must take tensors of the CPU and tags, as gloo does; `allocate` returns an
    empty tensor of the CPU for a message.
    """

    def __init__(
        self,
        rank: int,
        places: Sequence[TaskDevice],
        route: Route,
        allocate: Callable[[Message], torch.Tensor],
        group: dist.ProcessGroup | None,
    ) -> None:
        self._rank = rank
        self._places = places
        self._route = route
        self._allocate = allocate
        self._group = group
        self._local: dict[Message, torch.Tensor | None] = {}
        self._coming: dict[Message, tuple[Any, torch.Tensor]] = {}
        self._sent: list[tuple[int, int, Any, torch.Tensor, int]] = []  # a heap, by consumer

    def expect(self, message: Message) -> None:
        """Begins to receive a message, if it comes from another task and this is not yet so."""
        sender = self._places[message.sender].rank
        if sender != self._rank and message not in self._coming:
            buffer = self._allocate(message)
            tag, _ = self._route[message]
            with _exchanging(sender, begins=True):
                self._coming[message] = dist.irecv(buffer, sender, self._group, tag), buffer

    def take(self, message: Message) -> torch.Tensor | None:
        """Waits for a value, and returns it on the device of its place; None for no gradient."""
        if message in self._local:
            return self._local.pop(message)
        self.expect(message)
        work, buffer = self._coming.pop(message)
        with _exchanging(self._places[message.sender].rank):
            work.wait()
        if message.back and _is_none(buffer):
            return None
        device = self._places[message.receiver].device
        return buffer if device.type == "cpu" else buffer.to(device)

    def send(self, message: Message, tensor: torch.Tensor | None) -> None:
        """Sends a tensor, or that a gradient does not exist, and does not wait for the receiver.

        Nobody may change the tensor's memory any more.
        """
        place = self._places[message.receiver]
        if place.rank == self._rank:
            self._local[message] = None if tensor is None else tensor.to(place.device)
            return
        if tensor is None:
            tensor = _none(self._allocate(message))
        else:  # as gloo sends it: of the CPU, contiguous, and as its memory says
            tensor = tensor.resolve_conj().resolve_neg().cpu().contiguous()
        tag, consumer = self._route[message]
        with _exchanging(place.rank, begins=True):
            work = dist.isend(tensor, place.rank, self._group, tag)
        heapq.heappush(self._sent, (consumer, tag, work, tensor, place.rank))

    def release(self, position: float = math.inf) -> None:
        """Releases the memory of messages whose receiver is before a position of the plan.

        Waits for them if necessary. That keeps the order of the plan, and so never deadlocks.
        """
        while self._sent and self._sent[0][0] < position:
            _, _, work, _, rank = heapq.heappop(self._sent)
            with _exchanging(rank):
                work.wait()


def _none(buffer: torch.Tensor) -> torch.Tensor:
    """Returns a buffer that says that there is no gradient; zeros if its dtype is of 8 bits."""
    if buffer.itemsize == 1:
        return buffer.zero_()
    buffer.view(-1).view(torch.int16).fill_(_NONE)
    return buffer


def _is_none(buffer: torch.Tensor) -> bool:
    if buffer.itemsize == 1 or not buffer.numel():
        return False
    bits = buffer.view(-1).view(torch.int16)
    return bits[0].item() == _NONE and bool((bits == _NONE).all())


@contextmanager
def _exchanging(rank: int, *, begins: bool = False) -> Iterator[None]:
    """Names the tasks of torch's errors; where a transfer `begins`, others are this task's own."""
    try:
        yield
    except RuntimeError as error:
        # Of gloo's own errors only the text says what they are.
        if begins and not (isinstance(error, dist.DistError) or "gloo" in str(error).lower()):
            raise
        raise RuntimeError(
            f"rank {rank}, with which this task exchanges values of the graph, has gone or does "
            f"not answer: {error}"
        ) from error

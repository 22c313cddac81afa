"""The operations of a worker with the servers. Without I/O.

An operation is a generator: it yields what to do next, and is sent the result. A worker's client
runs operations over real connections, the simulator in virtual time.

    yielded   what to do                                               what is sent back
    Ask       ask servers, and wait for their answers                  the answers, by server
    AWAIT     wait for the answers to the push under way               the same
    PUSH      send the push under way once more, to other shards       nothing
    DIVIDE    lay the model out over the shards of the newest view     its layout
    PUBLISH   give the model the values, which have come completely    nothing
    Pause     let so many seconds pass                                 the time, in seconds

Where there are other shards now, `Divided` is raised at an `Ask` or `AWAIT`. A worker has one
thread: it begins an operation when the one before is over.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from typing import Any, Literal, TypeVar

import msgspec

from trireme.errors import FrameError
from trireme.ps.client.lanes import Answer, Request
from trireme.ps.snapshot_messages import Snapshot, TensorSpec
from trireme.wire.message import Message


class Ask(msgspec.Struct, frozen=True):
    """Ask servers, in this order; `again`: ask again under the newest view what was fenced off."""

    requests: Mapping[int, Request]
    again: bool = True


class Pause(msgspec.Struct, frozen=True):
    """Let so many seconds pass."""

    seconds: float


AWAIT: Literal["await"] = "await"
PUSH: Literal["push"] = "push"
DIVIDE: Literal["divide"] = "divide"
PUBLISH: Literal["publish"] = "publish"

_T = TypeVar("_T")
_M = TypeVar("_M", bound=Message)
Operation = Generator[Ask | Pause | Literal["await", "push", "divide", "publish"], Any, _T]
"""An operation of a worker with the servers, and its result."""

Answers = Mapping[int, Answer]

Copy = list[tuple[Snapshot, Sequence[Any]]]
"""The servers' answers to one request for a copy, in the servers' order, with the payloads."""

Parts = Sequence[tuple[tuple[TensorSpec, ...], Sequence[Any]]]
"""By server: descriptions of tensors, and the payload that holds them."""


def expect(answer: Answer, wanted: type[_M]) -> _M:
    """Returns an answer's message, of the type that is expected."""
    message = answer[0]
    if not isinstance(message, wanted):
        raise FrameError(
            f"a parameter server answered with {type(message).__name__} where {wanted.__name__} "
            "was due"
        )
    return message

"""The messages by which a worker lends memory to a server of its host, over shm://."""

from __future__ import annotations

from typing import ClassVar

from trireme.ps.messages import FromWorker, Pairs
from trireme.wire.message import Message, Number


class LendMemory(FromWorker, frozen=True, array_like=True):
    """A worker lends this server memory; its descriptor comes along. Answered by `MemoryLent`."""

    kind: ClassVar[int] = 92
    nbytes: Number  # the memory's size
    outbound: Pairs  # (offset, length) in bytes of the places that pushes come from
    inbound: Pairs  # of the places that values go to
    extra: bool = False  # whether `LendExtra` follows


class LendExtra(FromWorker, frozen=True, array_like=True):
    """A worker lends so many bytes for extra values over this connection; as `LendMemory`."""

    kind: ClassVar[int] = 126
    nbytes: Number


class MemoryLent(Message, frozen=True, array_like=True):
    """The answer to `LendMemory` and `LendExtra`: whether the server sees the memory."""

    kind: ClassVar[int] = 93
    accepted: bool

"""What a proxy does to single frames: repeats them, late too, swaps them, breaks off inside one.

A treatment belongs to one direction of one connection. It sees every frame that goes that way.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Protocol

from trireme.wire.message import HEADER_SIZE, Limits, unpack_header

LIMITS = Limits()


@dataclass(frozen=True)
class Frame:
    """A frame as it passes: the kind of its message, its sequence, and all of its bytes."""

    kind: int
    sequence: int
    raw: bytes


class Break(Exception):
    """The connection is to break after these bytes."""

    def __init__(self, passed: bytes) -> None:
        super().__init__(f"after {len(passed)} bytes")
        self.passed = passed


class Treatment(Protocol):
    """Decides what passes in place of a frame."""

    def treat(self, frame: Frame) -> list[bytes]:
        """Returns what is sent on when a frame has come.

        Raises:
            Break: the connection breaks here.
        """

    def idle(self) -> list[bytes]:
        """Returns what is sent on when no frame has come for a while."""


class Splitter:
    """Splits a stream of bytes into frames."""

    def __init__(self) -> None:
        self._bytes = bytearray()

    def feed(self, data: bytes) -> Iterator[Frame]:
        """Takes bytes, and yields the frames that are complete now."""
        self._bytes += data
        while len(self._bytes) >= HEADER_SIZE:
            header = unpack_header(self._bytes, LIMITS)
            payload = 0 if header.lent else header.payload_length
            length = HEADER_SIZE + header.metadata_length + payload
            if len(self._bytes) < length:
                return
            raw = bytes(self._bytes[:length])
            del self._bytes[:length]
            yield Frame(header.kind, header.sequence, raw)


class Untouched:
    """Lets every frame pass. The base of treatments that touch some kinds of messages only.

    Args:
        kinds: of the messages that it touches.
        seed: draws which of them.
        chance: of each to be touched.
    """

    def __init__(self, kinds: Collection[int], seed: int = 0, chance: float = 1.0) -> None:
        self._kinds = frozenset(kinds)
        self._dice = random.Random(seed)
        self._chance = chance
        self.touched = 0

    def treat(self, frame: Frame) -> list[bytes]:
        if frame.kind not in self._kinds or self._dice.random() >= self._chance:
            return self.pass_on(frame)
        self.touched += 1
        return self.touch(frame)

    def idle(self) -> list[bytes]:
        return []

    def touch(self, frame: Frame) -> list[bytes]:
        """Returns what is sent on in place of a frame that is touched."""
        return [frame.raw]

    def pass_on(self, frame: Frame) -> list[bytes]:
        """Returns what is sent on when a frame has come that is not touched."""
        return [frame.raw]


class Repeated(Untouched):
    """Frames come twice, one right after the other."""

    def touch(self, frame: Frame) -> list[bytes]:
        return [frame.raw, frame.raw]


class Late(Untouched):
    """Frames come once more, after a number of others that are touched too."""

    others = 3

    def __init__(self, kinds: Collection[int], seed: int = 0, chance: float = 1.0) -> None:
        super().__init__(kinds, seed, chance)
        self._kept: list[bytes] = []

    def touch(self, frame: Frame) -> list[bytes]:
        self._kept.append(frame.raw)
        late = [self._kept.pop(0)] if len(self._kept) > self.others else []
        return [*late, frame.raw]


class Swapped(Untouched):
    """A frame waits until another has overtaken it, or none comes."""

    def __init__(self, kinds: Collection[int], seed: int = 0, chance: float = 1.0) -> None:
        super().__init__(kinds, seed, chance)
        self._held: list[bytes] = []

    def touch(self, frame: Frame) -> list[bytes]:
        released, self._held = self._held, [frame.raw]
        return released

    def pass_on(self, frame: Frame) -> list[bytes]:
        return [frame.raw, *self.idle()]

    def idle(self) -> list[bytes]:
        released, self._held = self._held, []
        return released


class Truncated(Untouched):
    """The connection breaks inside a frame, after some of its bytes.

    Args:
        kinds: of the messages that it touches.
        keep: after how many bytes of the frame.
    """

    def __init__(self, kinds: Collection[int], keep: int) -> None:
        super().__init__(kinds)
        self._keep = keep

    def touch(self, frame: Frame) -> list[bytes]:
        raise Break(frame.raw[: self._keep])

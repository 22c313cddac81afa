"""What requests and answers say of extra values: values of another kind than parameters.

A plug-in holds them, such as the rows of sparse tables, and alone knows what the bytes mean.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Protocol

import msgspec

from trireme.errors import FrameError
from trireme.wire.message import Name, Number

ALIGNMENT = 64  # bytes of extra values begin at multiples of so many


class Place(msgspec.Struct, frozen=True, array_like=True):
    """A place in the memory that a worker lends for extra values."""

    offset: Number  # where it begins, in bytes
    nbytes: Number  # its length in bytes


Extra = tuple[bytes | Place, ...]  # the part of a request or an answer: bytes, or where they lie


def aligned(nbytes: int) -> int:
    """Returns a length, rounded up to a multiple of those at which such bytes begin."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


class LentMemory(Protocol):
    """A worker's use of the memory that it lends for extra values, as a transport has it."""

    def space(self, nbytes: int) -> memoryview | None:
        """Returns memory for what the next request sends; None if that is more than there is."""

    def sent(self, extra: Extra) -> Extra:
        """Returns a request with the places of its bytes, which are copied if they lie elsewhere.

        It is returned as it is where there is no room.
        """

    def received(self, extra: Extra) -> Extra:
        """Returns a request, or an answer, with the bytes at the places that it names."""


class ShownExtension(msgspec.Struct, frozen=True, array_like=True):
    """What extra values a job has: all workers must show the same."""

    kind: Name  # the name of the plug-in's entry point
    parts: Annotated[tuple[str, ...], msgspec.Meta(max_length=1 << 12)]  # descriptions of them


Space = Callable[[int, int], memoryview]  # returns memory for so many bytes to a shard


class ExtraParts(ABC):
    """The parts of a request, by shard."""

    @abstractmethod
    def of_shard(self, shard: int, space: Space | None = None) -> Extra:
        """Returns a shard's part; its bytes lie in memory that `space` returns, if it is given."""

    @abstractmethod
    def united(self, answers: Sequence[Extra]) -> Any:
        """Returns what the shards' answers bring.

        Raises:
            FrameError: an answer is of another size.
        """


class ExtraRequest(ABC):
    """What a worker asks of extra values: updates, and which of them the answer brings."""

    @abstractmethod
    def divided(self, bounds: Sequence[int]) -> ExtraParts:
        """Divides the request among the shards that begin at these slots.

        Raises:
            ConfigurationError: a part does not fit into one message.
        """


def bytes_in(extra: Extra) -> list[bytes]:
    """Returns the bytes of an `Extra`, which must be at hand."""
    if any(isinstance(each, Place) for each in extra):
        raise FrameError("a message names places in memory that was not lent over its connection")
    return [each for each in extra if not isinstance(each, Place)]

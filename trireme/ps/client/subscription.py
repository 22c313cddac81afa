"""A worker's side of published values: what has changed is added to what it has."""

from __future__ import annotations

from collections.abc import Sequence

from trireme.errors import FrameError
from trireme.ps.compression import Packed
from trireme.ps.flat import PartBuffer
from trireme.ps.messages import PullReply, PushReply
from trireme.ps.shard.values.published_values import add_packed
from trireme.wire.codec import Codec

__all__ = ["Subscription"]


class Subscription:
    """The published values of all servers, as one worker has them.

    They lie where values are received. Who computes in that memory puts them back before an answer
    is taken: an answer may be what has changed since.

    Args:
        codec: what changes are packed with.
        values: where each server's values are received.
    """

    def __init__(self, codec: Codec, values: Sequence[PartBuffer]) -> None:
        self._codec = codec
        self._values = values
        self._packed = [Packed(codec, part, deflates=True) for part in values]
        self._steps: list[int | None] = [None] * len(values)

    def place(self, server: int, length: int) -> Sequence[memoryview]:
        """Returns where a packed change of so many bytes is received.

        Raises:
            FrameError: it cannot be one.
        """
        packed = self._packed[server]
        if not packed.fits(length):
            raise FrameError(
                f"ps:{server} sent {length} bytes of packed values where its part packs into "
                f"{packed.nbytes}"
            )
        return packed.place(length)

    def take(self, server: int, reply: PushReply | PullReply) -> int:
        """Takes one server's answer, whose payload has come; returns how many bytes that was.

        After the answers of all servers the published values are at hand.

        Raises:
            FrameError: it makes no sense, or is a change of other values than those at hand.
        """
        since = reply.since if isinstance(reply, PushReply) else None
        size = self._values[server].nbytes if since is None else self._add(server, since)
        self._steps[server] = reply.step
        return size

    def _add(self, server: int, since: int) -> int:
        """Adds what has changed; returns of how many bytes it was."""
        packed = self._packed[server]
        if since != self._steps[server]:
            raise FrameError(
                f"ps:{server} sent what has changed since step {since}, and the values at hand are "
                f"of step {self._steps[server]}"
            )
        try:
            packed.open()
            for vector, change in zip(packed.vectors, packed.packed, strict=True):
                add_packed(self._codec, change, vector)
        except ValueError as error:
            raise FrameError(f"what ps:{server} sent of its values: {error}") from error
        return sum(view.nbytes for view in packed.views)

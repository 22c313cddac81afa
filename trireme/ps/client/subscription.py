"""A worker's copy of published values, to which it adds the changes that servers send."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from trireme.errors import FrameError
from trireme.ps.compression import Packed
from trireme.ps.flat import PartBuffer
from trireme.ps.messages import PullReply, PushReply
from trireme.ps.shard.values.published_values import add_packed
from trireme.wire.codec import Codec


class Subscription:
    """The published values of all servers, as one worker has them.

    They lie where values are received. A worker that computes in that memory restores them before
    it takes an answer, which may be the change since.

    Args:
        codec: the codec of packed changes.
        values: the memory of each server's values.
        task: returns the name of a server, for errors.
    """

    def __init__(
        self,
        codec: Codec,
        values: Sequence[PartBuffer],
        task: Callable[[int], str] = lambda server: f"ps:{server}",
    ) -> None:
        self._codec = codec
        self._task = task
        self._values = values
        self._packed = [Packed(codec, part, deflates=True) for part in values]
        self._steps: list[int | None] = [None] * len(values)

    def place(self, server: int, length: int) -> Sequence[memoryview]:
        """Returns memory for a packed change of so many bytes.

        Raises:
            FrameError: a packed change is not of this size.
        """
        packed = self._packed[server]
        if not packed.fits(length):
            raise FrameError(
                f"{self._task(server)} sent {length} bytes of packed values where its part packs "
                f"into {packed.nbytes}"
            )
        return packed.place(length)

    def take(self, server: int, reply: PushReply | PullReply) -> int:
        """Takes one server's answer, whose payload has come; returns how many bytes that was.

        After the answers of all servers the published values are complete.

        Raises:
            FrameError: the answer makes no sense, or is a change of other values than these.
        """
        since = reply.since if isinstance(reply, PushReply) else None
        size = self._values[server].nbytes if since is None else self._add(server, since)
        self._steps[server] = reply.step
        return size

    def _add(self, server: int, since: int) -> int:
        """Adds a change; returns its size in bytes."""
        packed = self._packed[server]
        if since != self._steps[server]:
            raise FrameError(
                f"{self._task(server)} sent what has changed since step {since}, and the values at "
                f"hand are of step {self._steps[server]}"
            )
        try:
            packed.open()
            for vector, change in zip(packed.vectors, packed.packed, strict=True):
                add_packed(self._codec, change, vector)
        except ValueError as error:
            raise FrameError(f"what {self._task(server)} sent of its values: {error}") from error
        return sum(view.nbytes for view in packed.views)

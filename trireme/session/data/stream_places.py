"""Where streams are read: shared with the other workers, and kept in checkpoints."""

from __future__ import annotations

import base64
import time
from collections.abc import Callable

from trireme.data.bookmarks import Bookmarks
from trireme.data.stream import Stream
from trireme.session.worker.worker import Worker

_SECONDS = 2.0


class StreamPlaces:
    """Shares the bookmarks of streams, so that any worker may continue where another has read."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._streams: dict[str, Stream] = {}
        worker.checkpoints.places = self.everybodys

    def begin(self, name: str, stream: Stream) -> Callable[[], None]:
        """Begins to read a stream from what is known of it.

        Returns a function that shares the bookmarks if there are new ones and some time has passed.
        """
        before = self._streams.get(name)
        known = self._worker.checkpoints.known_places.get(name)
        earlier = None if before is None else before.bookmarks.encode()
        for data in (earlier, known, *self._worker.backend.collect(f"stream/{name}").values()):
            if data is not None:
                stream.bookmarks.merge(data)
        self._streams[name] = stream
        shared_at, shared = time.monotonic(), b""

        def share() -> None:
            nonlocal shared_at, shared
            if time.monotonic() - shared_at < _SECONDS:
                return
            shared_at, data = time.monotonic(), stream.bookmarks.encode()
            if data != shared:
                shared = data
                self._worker.backend.share(f"stream/{name}", data)

        return share

    def everybodys(self) -> dict[str, str]:
        """Returns the bookmarks of all workers for a checkpoint, in base64, by data set."""
        found: dict[str, str] = {}
        for name, stream in self._streams.items():
            together = Bookmarks()
            together.merge(stream.bookmarks.encode())
            for data in self._worker.backend.collect(f"stream/{name}").values():
                together.merge(data)
            found[name] = base64.b64encode(together.encode()).decode()
        return found

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
    """Shares the bookmarks of streams, so that any worker may go on where another has read."""

    def __init__(self, worker: Worker, now: Callable[[], float] = time.monotonic) -> None:
        self._worker = worker
        self._now = now
        self._streams: dict[str, Stream] = {}
        worker.checkpoints.places = self.everybodys

    def of(self, name: str, stream: Stream) -> Place:
        """Returns the place of a stream, which begins with what is known of it."""
        before = self._streams.get(name)
        known = self._worker.checkpoints.known_places.get(name)
        shared = self._worker.backend.collect(topic_of(name))
        earlier = None if before is None else before.bookmarks.encode()
        for data in (earlier, known, *shared.values()):
            if data is not None:
                stream.bookmarks.merge(data)
        self._streams[name] = stream
        return Place(self._worker, name, stream, self._now)

    def everybodys(self) -> dict[str, str]:
        """Returns the bookmarks of all workers for a checkpoint, in base64, by data set."""
        found: dict[str, str] = {}
        for name, stream in self._streams.items():
            together = Bookmarks()
            together.merge(stream.bookmarks.encode())
            for data in self._worker.backend.collect(topic_of(name)).values():
                together.merge(data)
            found[name] = base64.b64encode(together.encode()).decode()
        return found


class Place:
    """Shares the bookmarks of one stream from time to time."""

    def __init__(self, worker: Worker, name: str, stream: Stream, now: Callable[[], float]) -> None:
        self._worker = worker
        self._topic = topic_of(name)
        self._stream = stream
        self._now = now
        self._shared_at = now()
        self._shared = b""

    def keep(self) -> None:
        """Shares the bookmarks, if there are new ones and some time has passed."""
        if self._now() - self._shared_at < _SECONDS:
            return
        self._shared_at = self._now()
        data = self._stream.bookmarks.encode()
        if data != self._shared:
            self._shared = data
            self._worker.backend.share(self._topic, data)


def topic_of(name: str) -> str:
    """Returns the topic under which workers share the bookmarks of a data set."""
    return f"stream/{name}"

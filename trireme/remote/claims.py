"""The lock of a run directory in an object store: its writers, and signs of their lives.

An entry is made by a conditional put. Its writer rewrites a small object every few seconds. Another
job that wants to write is refused while that object changes, and takes the directory when it has
not changed for longer than a living writer takes. Clocks are not compared.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress

import msgspec

from trireme.location import StoreError
from trireme.remote.object_store import ObjectStore
from trireme.session.checkpoint.run_lock import (
    WRITER_DECODER,
    WRITERS,
    RunLock,
    Writer,
    entry_name,
    number_of,
)
from trireme.wire.clock import Clock, MonotonicClock

BEAT_SECONDS = 10.0  # how often a writer shows that it lives

SILENT_SECONDS = 45.0
"""After this time without a sign of life a writer on another host is taken to have ended."""

_POLL_SECONDS = 2.0

_log = logging.getLogger(__name__)


class RemoteLock(RunLock):
    """That of a run directory in an object store."""

    def __init__(
        self,
        store: ObjectStore,
        clock: Clock | None = None,
        sleep: Callable[[float], object] = time.sleep,
    ) -> None:
        self.run_dir = store.root
        self._store = store
        self._clock, self._sleep = clock or MonotonicClock(), sleep
        self._life: _Life | None = None  # of this process's newest entry
        self._writer: Writer | None = None

    def newest(self) -> tuple[int, Writer | None]:
        number = newest_number(self._store.list(WRITERS))
        if not number:
            return 0, None
        key = entry_key(number)
        try:
            return number, WRITER_DECODER.decode(self._store.read(key))
        except (msgspec.MsgspecError, UnicodeError) as error:
            raise StoreError(
                f"{self.run_dir / key} is damaged: {error}. Delete it to go on from the entry "
                "before it"
            ) from error

    def add(self, number: int, writer: Writer) -> bool:
        if not self._store.create(entry_key(number), msgspec.json.encode(writer)):
            return False
        self._life, self._writer = _Life(self._store, number), writer
        return True

    def ended(self, number: int, writer: Writer | None) -> bool:
        if writer is None or writer.released or writer.gone:
            return True
        if writer.here:
            return False
        _log.warning(
            "%s may still write to %s: waiting for up to %g s for a sign of its life",
            writer.words,
            self.run_dir,
            SILENT_SECONDS,
        )
        sign, until = self._sign(number), self._clock.now() + SILENT_SECONDS
        while self._clock.now() < until:
            self._sleep(_POLL_SECONDS)
            if self._sign(number) != sign:
                return False
        return True

    def _sign(self, number: int) -> bytes:
        try:
            return self._store.read(_life_key(number))
        except FileNotFoundError:
            return b""

    def is_newest(self) -> bool:
        return self._life is not None and not self._life.lost

    def end(self) -> None:
        assert self._life is not None and self._writer is not None, "it was claimed"
        self._life.end()
        with suppress(OSError):  # then the next writer waits until this one is silent
            gone = msgspec.structs.replace(self._writer, released=True)
            self._store.put(entry_key(self.number), msgspec.json.encode(gone))
            self._store.delete([_life_key(self.number)])


class _Life:
    """Shows, by a thread, that a writer lives, and looks whether there is a later one."""

    def __init__(self, store: ObjectStore, number: int) -> None:
        self.number, self.lost = number, False
        self._store = store
        self._beats = 0
        self._ended = threading.Event()
        with suppress(OSError):  # the thread tries again
            self.beat()
        self._thread = threading.Thread(target=self._run, name="trireme-run-lock", daemon=True)
        self._thread.start()

    def beat(self) -> None:
        self._beats += 1
        self._store.put(_life_key(self.number), b"%d" % self._beats)

    def end(self) -> None:
        """Ends the thread, once a request that is under way has been answered."""
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        while not self.lost and not self._ended.wait(BEAT_SECONDS):
            with suppress(OSError):
                self.beat()
                self.lost = newest_number(self._store.list(WRITERS)) > self.number
                if self.lost:
                    _log.warning("another job has taken the run directory %s", self._store.root)


def newest_number(keys: Iterable[str]) -> int:
    """Returns the number of the newest entry among the objects of `writers/`; 0 for none."""
    names = (key.split("/")[1] for key in keys if key.endswith("/writer.json"))
    return max(map(number_of, names), default=0)


def entry_key(number: int) -> str:
    """Returns the key of an entry."""
    return f"{WRITERS}/{entry_name(number)}/writer.json"


def _life_key(number: int) -> str:
    return f"{WRITERS}/{entry_name(number)}/alive"

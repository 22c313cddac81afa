"""The lock of a run directory in an object store: its writer, and a sign of life.

The newest entry of the run's ledger names the writer. It rewrites a small object every few seconds.
Another job that wants to write is refused while that object changes. When it has not changed for
longer than a living writer takes, the other job adds an entry of its own, after which the earlier
writer cannot publish any more, should it still live. Clocks are not compared.

A chief that takes over within the same job does not wait.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress

import msgspec

from trireme.clock import Clock, MonotonicClock
from trireme.errors import CheckpointLockLost, ConfigurationError
from trireme.remote.ledger import Entry, Ledger
from trireme.remote.object_store import ObjectStore
from trireme.session.checkpoint.run_lock import Writer, came_between, refusal, succeeds
from trireme.stores import StoreError

BEAT_SECONDS = 10.0
"""How often a writer shows that it lives."""

SILENT_SECONDS = 45.0
"""After this time without a sign of life a writer on another host is taken to have ended."""

_POLL_SECONDS = 2.0
_log = logging.getLogger(__name__)


class RemoteLock:
    """The right to write to a run directory in an object store.

    Attributes:
        writer: this process.
        checkpoints: the folder of each checkpoint, by its name.
    """

    def __init__(
        self, store: ObjectStore, number: int, writer: Writer, checkpoints: Mapping[str, str]
    ) -> None:
        self.writer = writer
        self.checkpoints = dict(checkpoints)
        self._store = store
        self._ledger = Ledger(store)
        self._number = number
        self._lost = False
        self._closed = threading.Event()
        self._changing = threading.Lock()
        self._beats = 0
        self._beat()
        self._thread = threading.Thread(target=self._live, name="trireme-run-lock", daemon=True)
        self._thread.start()

    @classmethod
    def claim(
        cls,
        store: ObjectStore,
        writer: Writer,
        *,
        first: bool = True,
        clock: Clock | None = None,
        sleep: Callable[[float], object] = time.sleep,
    ) -> RemoteLock:
        """Takes a run directory for this process.

        Args:
            store: the objects of the run.
            writer: this process, with the view in which it is chief.
            first: whether the job begins; see `RunLock.claim`.
            clock: measures how long another writer is silent.
            sleep: waits between two looks at it.

        Raises:
            ConfigurationError: another process writes there, or a later chief of this job does or
                did; names it.
            OSError: the store refuses.
        """
        ledger, silence = Ledger(store), _Silence(store, clock or MonotonicClock())
        while True:
            number, entry = ledger.newest()
            holder = None if entry is None else _writer(entry)
            if holder is not None and succeeds(holder, writer):
                raise ConfigurationError(
                    f"{holder.words} has taken over the run directory {store.root} as chief of "
                    f"view {holder.view} of this job: {writer.task}, which was chief of view "
                    f"{writer.view}, may write there no more"
                )
            free = (
                holder is None
                or holder.released
                or holder.gone
                or _same(holder, writer)  # its claim was added although the answer was lost
                or silence.passed(holder)
            )
            if holder is not None and free and not first and came_between(holder, writer):
                raise ConfigurationError(refusal(store.root, holder))
            if free or (holder is not None and succeeds(writer, holder)):
                named = msgspec.structs.replace(
                    writer, token=secrets.token_hex(8), since=time.time()
                )
                found = {} if entry is None else entry.checkpoints
                if ledger.add(number + 1, Entry(writer=_raw(named), checkpoints=found)):
                    return cls(store, number + 1, named, found)
                continue  # another process was faster
            assert holder is not None
            if holder.here or silence.broken:
                raise ConfigurationError(refusal(store.root, holder))
            sleep(_POLL_SECONDS)

    @property
    def held(self) -> bool:
        """Whether this process may write, as far as it knows; asks nobody."""
        return not self._closed.is_set() and not self._lost

    def check(self) -> None:
        """Checks that this process may write.

        Raises:
            CheckpointLockLost: another process may; names it.
            OSError: the store does not answer.
        """
        with self._changing:
            self._look()
        if not self.held:
            self._refuse()

    def _look(self) -> None:
        """Learns whether the newest entry is still one of this process."""
        number, entry = self._ledger.newest()
        # One that was added although the answer was lost is of this process, too.
        if entry is not None and _writer(entry).token == self.writer.token:
            self._number = number
        else:
            self._lost = True

    def _refuse(self) -> None:
        now = read_remote_writer(self._store)
        who = "nobody" if now is None or now.token == self.writer.token else now.words
        raise CheckpointLockLost(
            f"{self.writer.task} (process {self.writer.pid}) may no longer write to "
            f"{self._store.root}: {who} does, after the newest entry of its ledger"
        )

    def commit(self, checkpoints: Mapping[str, str]) -> None:
        """Publishes which checkpoints the run has; all of them, or nothing.

        Raises:
            CheckpointLockLost: another process has taken the directory; nothing is published.
            OSError: the store does not answer.
        """
        entry = Entry(writer=_raw(self.writer), checkpoints=dict(checkpoints))
        with self._changing:
            while self.held:
                if self._ledger.add(self._number + 1, entry):
                    self._number += 1
                    self.checkpoints = dict(checkpoints)
                    return
                self._look()
        self._refuse()

    def release(self) -> None:
        """Releases the lock. May be called again."""
        if self._closed.is_set():
            return
        with self._changing:
            self._closed.set()
            with suppress(OSError):  # then the next writer waits until this one is silent
                if not self._lost:
                    gone = msgspec.structs.replace(self.writer, released=True)
                    entry = Entry(writer=_raw(gone), checkpoints=self.checkpoints)
                    self._ledger.add(self._number + 1, entry)
                self._store.delete([_alive(self.writer)])

    def _live(self) -> None:
        """Shows that this process lives, and looks whether another one writes, until `release`."""
        while not self._closed.wait(BEAT_SECONDS):
            with self._changing, suppress(OSError):
                if not self.held:
                    return
                self._beat()
                self._look()
                if self._lost:
                    _log.warning("another job has taken the run directory %s", self._store.root)

    def _beat(self) -> None:
        self._beats += 1
        self._store.put(_alive(self.writer), b"%d" % self._beats)


class _Silence:
    """Measures how long another writer has shown no sign of life.

    Attributes:
        broken: whether it has shown one since the first look.
    """

    def __init__(self, store: ObjectStore, clock: Clock) -> None:
        self.broken = False
        self._store = store
        self._clock = clock
        self._seen: tuple[str, bytes] | None = None
        self._since = 0.0

    def passed(self, holder: Writer) -> bool:
        """Returns whether the holder has been silent for long enough."""
        try:
            beat = self._store.read(_alive(holder))
        except FileNotFoundError:
            beat = b""
        seen = (holder.token, beat)
        if seen != self._seen:
            self.broken = self._seen is not None
            if self._seen is None and not holder.here:
                _log.warning(
                    "%s may still write to %s: waiting for up to %g s for a sign of its life",
                    holder.words,
                    self._store.root,
                    SILENT_SECONDS,
                )
            self._seen, self._since = seen, self._clock.now()
        return self._clock.now() - self._since >= SILENT_SECONDS


def read_remote_writer(store: ObjectStore) -> Writer | None:
    """Returns the present or last writer of a run directory; None where there is none.

    Raises:
        OSError: the store refuses, or does not answer.
    """
    _, entry = Ledger(store).newest()
    return None if entry is None else _writer(entry)


def _writer(entry: Entry) -> Writer:
    try:
        return msgspec.json.decode(entry.writer, type=Writer)
    except msgspec.MsgspecError as error:
        raise StoreError(f"the ledger does not name its writer: {error}") from error


def _same(one: Writer, other: Writer) -> bool:
    """Returns whether both are of one process in one job."""
    return all(
        getattr(one, name) == getattr(other, name)
        for name in ("task", "epoch", "view", "host", "pid", "birth")
    )


def _alive(writer: Writer) -> str:
    return f"ledger/alive-{writer.token}"


def _raw(writer: Writer) -> msgspec.Raw:
    return msgspec.Raw(msgspec.json.encode(writer))

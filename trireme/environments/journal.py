"""The coordinator's journal: what it has decided, in one file, before anybody hears of it.

The file holds one state with its checksum, and is replaced as a whole: an older state, or a
damaged one, would give terms and views out twice.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import msgspec
from msgspec.structs import replace

from trireme.cluster.state import State
from trireme.errors import ClusterError, ConfigurationError
from trireme.files import PRIVATE, open_lock, sync_directory, try_lock, write_atomically

_MAGIC = b"trireme journal "
_VERSION = b"4\n"


class FileJournal:
    """The journal of one job's coordinator, which only one process can have open."""

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self._lock = os.fdopen(open_lock(f"{path}.lock", os.O_WRONLY | os.O_CREAT), "a")
            taken = try_lock(self._lock.fileno())
            content = path.read_bytes() if path.exists() else None
        except OSError as error:
            raise ConfigurationError(self._unusable(error)) from error
        if not taken:
            self._lock.close()
            raise ConfigurationError(
                f"another process has the coordinator's journal {path} open: the job has a "
                "coordinator already; end that one first"
            )
        try:  # the state that was written last; None where there is no file yet
            self.state = None if content is None else self._decoded(content)
        except ConfigurationError:
            self._lock.close()
            raise

    def write(self, state: State) -> None:
        """Writes a state to the disk, without the tasks' reports, which they repeat."""
        tasks = {name: replace(task, status={}) for name, task in state.tasks.items()}
        content = msgspec.msgpack.encode(replace(state, tasks=tasks))
        digest = hashlib.sha256(content).digest()
        try:
            data = _MAGIC + _VERSION + digest + content
            write_atomically(self._path, data, PRIVATE, durable=True)
            sync_directory(self._path.parent)
        except OSError as error:
            raise ClusterError(self._unusable(error)) from error

    def close(self) -> None:
        self._lock.close()

    def _decoded(self, data: bytes) -> State:
        head = len(_MAGIC) + len(_VERSION)
        if data[:head] not in (_MAGIC + _VERSION, b"") and data.startswith(_MAGIC):
            raise ConfigurationError(
                f"{self._path} is a journal of another version: continue the job with the release "
                "that began it"
            )
        content = data[head + 32 :]
        try:
            if hashlib.sha256(content).digest() != data[head : head + 32]:
                raise ValueError("its checksum is another one")
            return msgspec.msgpack.decode(content, type=State)
        except (msgspec.DecodeError, ValueError, TypeError) as error:
            raise ConfigurationError(
                f"{self._path} is no journal of a coordinator, or damaged ({error}): bring the "
                "file of this job there, or start the whole job again with another file"
            ) from error

    def _unusable(self, error: OSError) -> str:
        return (
            f"the coordinator's journal {self._path} cannot be used: {error}; check the directory, "
            "its permissions, and the space on the disk"
        )

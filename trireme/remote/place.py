"""A run directory in an object store.

    s3://bucket/run/
      ledger/000000000042.json                          who writes, and which checkpoints there are
      checkpoints/step-000001234-1f2e3d4c/state.json    the files of a checkpoint, as on a disk

Each save has a folder of its own, with a random name, which nobody reads until an entry of the
ledger says that it is the checkpoint of a step. So a checkpoint is there as a whole or not at all,
and never a mixture of two. Folders that no entry names were left by killed processes or lost races;
the next save deletes them.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory

from trireme.errors import CheckpointError, ConfigurationError
from trireme.location import RemotePath
from trireme.remote.ledger import Ledger
from trireme.remote.lock import RemoteLock
from trireme.remote.object_store import ObjectStore
from trireme.session.checkpoint.manifest import (
    STATE,
    Manifest,
    check_record,
    read_manifest,
)
from trireme.session.checkpoint.place import Fetched, Fill, Location, Place, fetched_errors
from trireme.session.checkpoint.run_lock import Writer, writer_here
from trireme.session.checkpoint.tensors import FileRecord, write_file

CHECKPOINTS = "checkpoints"

_CONNECTIONS = 6
_PART_BYTES = 16 << 20  # of an object, that one request reads
_LENGTH_BYTES = 8  # of the header of a safetensors file, which follows
_MOST_HEADER_BYTES = 100_000_000  # as the library


class RemotePlace(Place):
    """A run directory in an object store.

    Args:
        store: the objects of the run.
    """

    def __init__(self, store: ObjectStore) -> None:
        self.run_dir: RemotePath = store.root
        self._store = store
        self._lock: RemoteLock | None = None

    # -- writing --------------------------------------------------------------------------------

    def claim(self, writer: Writer, *, first: bool = True) -> RemoteLock:
        if first:
            self._store.check_writable()
        self._lock = RemoteLock.claim(self._store, writer, first=first)
        return self._lock

    def prepare(self) -> None:
        """Does nothing: `claim` has written there."""

    def checkpoint(self, name: str) -> Location:
        return self.run_dir / CHECKPOINTS / name

    def write(self, name: str, fill: Fill, allowed: Callable[[], None]) -> Location:
        final = self.checkpoint(name)
        with self._locked() as lock:
            allowed()
            self._sweep(lock)
            folder = f"{name}-{secrets.token_hex(4)}"
            records: dict[str, FileRecord] = {}

            def write(path: RemotePath, chunks: Iterable[bytes | memoryview]) -> FileRecord:
                with TemporaryDirectory(prefix="trireme-") as temporary:
                    file = Path(temporary, path.name)
                    records[path.name] = write_file(file, chunks, durable=False)
                    self._store.upload(f"{CHECKPOINTS}/{folder}/{path.name}", file)
                return records[path.name]

            def reuse(source: Location, files: Mapping[str, FileRecord]) -> None:
                before = self._folder(source)
                for file_name, record in files.items():
                    key = f"{CHECKPOINTS}/{folder}/{file_name}"
                    self._store.copy(f"{before}/{file_name}", key)
                    records[file_name] = record

            fill(final, write, reuse)
            self._check_sizes(folder, records)
            allowed()
            before = lock.checkpoints.get(name)
            lock.commit({**lock.checkpoints, name: folder})
            if before is not None:
                self._delete(before)
        return final

    @contextmanager
    def _locked(self) -> Iterator[RemoteLock]:
        """Yields the lock; outside a job, one that is taken for the moment."""
        if self._lock is not None:
            yield self._lock
            return
        writer = writer_here("program", "program", epoch=uuid.uuid4().hex)
        lock = RemoteLock.claim(self._store, writer)
        try:
            yield lock
        finally:
            lock.release()

    def _sweep(self, lock: RemoteLock) -> None:
        """Deletes what killed processes have left behind."""
        found = {key.split("/")[1] for key in self._store.list(CHECKPOINTS) if key.count("/") > 1}
        uploads = self._store.unfinished_uploads(CHECKPOINTS)
        # Who takes the directory after this makes other folders than those that were listed before.
        lock.check()
        self._store.abort_uploads(uploads)
        for folder in found - set(lock.checkpoints.values()):
            self._delete(folder)

    def _delete(self, folder: str) -> None:
        """Deletes a folder that no entry names, as far as the store lets it."""
        with suppress(OSError):  # the next save tries again
            self._store.delete(self._store.list(f"{CHECKPOINTS}/{folder}"))

    def _check_sizes(self, folder: str, records: dict[str, FileRecord]) -> None:
        found = {
            key.rpartition("/")[2]: size
            for key, size in self._store.list(f"{CHECKPOINTS}/{folder}").items()
        }
        for name, record in records.items():
            if found.get(name) != record.size:
                raise OSError(
                    f"{self.run_dir / CHECKPOINTS / folder / name} has {found.get(name, 'no')} "
                    f"bytes after the upload of {record.size}"
                )

    def remove(self, path: Location) -> None:
        with self._locked() as lock:
            left = dict(lock.checkpoints)
            folder = left.pop(path.name, None)
            if folder is not None:
                lock.commit(left)
                self._delete(folder)

    # -- reading --------------------------------------------------------------------------------

    def list(self) -> dict[str, Location]:
        _, entry = Ledger(self._store).newest()
        names = () if entry is None else entry.checkpoints
        return {name: self.run_dir / CHECKPOINTS / name for name in names}

    def _folder(self, path: Location) -> str:
        """Returns the folder of a checkpoint.

        Raises:
            CheckpointError: there is no such checkpoint.
            ConfigurationError: the store cannot be read now.
        """
        with self._reading(path):
            _, entry = Ledger(self._store).newest()
        folder = None if entry is None else entry.checkpoints.get(path.name)
        if folder is None:
            raise CheckpointError(
                f"there is no checkpoint {path}: the ledger of {self.run_dir} does not name it"
            )
        return f"{CHECKPOINTS}/{folder}"

    @contextmanager
    def _reading(self, path: Location) -> Iterator[None]:
        """Translates errors of the store: one that does not answer is no damaged checkpoint."""
        try:
            yield
        except FileNotFoundError as error:
            raise CheckpointError(str(error)) from error
        except OSError as error:
            raise ConfigurationError(f"{path} cannot be read: {error}") from error

    def fetch(self, path: Location, *, content: bool = True) -> Fetched:
        folder = self._folder(path)
        temporary = TemporaryDirectory(prefix="trireme-")
        fetched = Fetched(Path(temporary.name, path.name), path, temporary)
        fetched.path.mkdir()
        try:
            with self._reading(path):
                sizes = self._store.list(folder)
                if (key := f"{folder}/{STATE}") in sizes:
                    (fetched.path / STATE).write_bytes(self._store.read(key))
            with fetched_errors(fetched):
                manifest = read_manifest(fetched.path)
            with self._reading(path):
                for name in manifest.files:
                    size = sizes.get(f"{folder}/{name}")
                    if size is not None:  # else it is missing, which the reader says
                        whole = content or not name.endswith(".safetensors")
                        self._copy(f"{folder}/{name}", size, fetched.path / name, whole=whole)
        except BaseException:
            fetched.close()
            raise
        return fetched

    def _copy(self, key: str, size: int, target: Path, *, whole: bool) -> None:
        """Copies an object to a file of its size; if not `whole`, only the header of tensors."""
        with target.open("wb") as file, ThreadPoolExecutor(_CONNECTIONS) as threads:
            file.truncate(size)
            stop = size
            if not whole:
                length = int.from_bytes(
                    self._store.read(key, 0, min(_LENGTH_BYTES, size)), "little"
                )
                stop = min(size, _LENGTH_BYTES + min(length, _MOST_HEADER_BYTES))

            def copy(start: int) -> None:
                part = self._store.read(key, start, min(start + _PART_BYTES, stop))
                os.pwrite(file.fileno(), part, start)

            for done in [threads.submit(copy, start) for start in range(0, stop, _PART_BYTES)]:
                done.result()

    def verify_content(self, path: Location, manifest: Manifest) -> None:
        folder = self._folder(path)
        with self._reading(path):
            sizes = self._store.list(folder)
        for name, record in manifest.files.items():
            size = sizes.get(f"{folder}/{name}")
            if size is None:
                raise CheckpointError(f"{path}/{name} cannot be read: it is not there")
            digest = hashlib.sha256()
            with self._reading(path):
                for start in range(0, size, _PART_BYTES) if size == record.size else ():
                    digest.update(
                        self._store.read(f"{folder}/{name}", start, min(start + _PART_BYTES, size))
                    )
            check_record(f"{path}/{name}", record, FileRecord(size, digest.hexdigest()))

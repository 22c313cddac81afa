"""A run directory in an object store.

    s3://bucket/run/
      writers/000003/writer.json, alive                    a claim, and its writer's sign of life
      checkpoints/step-000001234-writer-3/state.json       the files of a checkpoint, as on a disk

A folder is a checkpoint once it has `state.json`, which is written last, and deleted first.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory

from trireme.errors import CheckpointError, ConfigurationError
from trireme.location import Location, RemotePath
from trireme.remote.claims import RemoteLock
from trireme.remote.object_store import ObjectStore
from trireme.session.checkpoint.manifest import CHECKPOINTS, STATE, order_of, read_manifest
from trireme.session.checkpoint.place import Fill, Place
from trireme.session.checkpoint.tensors import SUFFIX, FileRecord, write_file

_CONNECTIONS = 6
_PART_BYTES = 16 << 20  # of an object, that one request reads
_LENGTH_BYTES = 8  # of the header of a safetensors file, which follows
_MOST_HEADER_BYTES = 100_000_000  # as the library


class RemotePlace(Place):
    """A run directory in an object store."""

    def __init__(self, store: ObjectStore) -> None:
        self.run_dir: RemotePath = store.root
        self.lock = RemoteLock(store)
        self._store = store

    def open(self, *, first: bool) -> None:
        if first:
            self._store.check_writable()

    def folders(self) -> Iterable[Location]:
        return [self.run_dir / CHECKPOINTS / name for name in self._folders(whole=True)]

    def _folders(self, *, whole: bool) -> set[str]:
        keys = [key.split("/") for key in self._store.list(CHECKPOINTS)]
        done = {key[1] for key in keys if key[2:] == [STATE]}
        return done if whole else {key[1] for key in keys if len(key) > 2} - done

    # -- writing --------------------------------------------------------------------------------

    def write(self, name: str, fill: Fill) -> Location:
        folder, records = f"{CHECKPOINTS}/{name}", dict[str, FileRecord]()
        with suppress(FileNotFoundError):  # its writer has saved the step, and went back behind it
            self._store.delete([f"{folder}/{STATE}"])

        def write(path: RemotePath, chunks: Iterable[bytes | memoryview]) -> FileRecord:
            with TemporaryDirectory(prefix="trireme-") as temporary:
                file = Path(temporary, path.name)
                records[path.name] = write_file(file, chunks, durable=False)
                self._store.upload(f"{folder}/{path.name}", file)
            return records[path.name]

        final = self.run_dir / CHECKPOINTS / name
        fill(final, write)
        try:
            self._check_sizes(folder, records)
        except BaseException:
            self.remove(final)  # a later writer has deleted files of it before it was whole
            raise
        writer = (order_of(name) or (0, 0))[0]
        for part in self._folders(whole=False):
            if (order_of(part) or (0, 0))[0] <= writer:
                self._delete(part)
        return final

    def _delete(self, folder: str) -> None:
        with suppress(OSError):  # the next save tries again
            self._store.delete(self._store.list(f"{CHECKPOINTS}/{folder}"))

    def _check_sizes(self, folder: str, records: Mapping[str, FileRecord]) -> None:
        sizes = self._store.list(folder)
        for name, record in records.items():
            found = sizes.get(f"{folder}/{name}")
            if found != record.size:
                raise OSError(
                    f"{self.run_dir / folder / name} has {'no' if found is None else found} bytes "
                    f"after the upload of {record.size}"
                )

    def remove(self, path: Location) -> None:
        self._store.delete([f"{CHECKPOINTS}/{path.name}/{STATE}"])
        self._delete(path.name)

    # -- reading --------------------------------------------------------------------------------

    @contextmanager
    def _reading(self, path: Location) -> Iterator[None]:
        """Translates errors of the store: one that does not answer is no damaged checkpoint."""
        try:
            yield
        except FileNotFoundError as error:
            raise CheckpointError(str(error)) from error
        except OSError as error:
            raise ConfigurationError(f"{path} cannot be read: {error}") from error

    @contextmanager
    def fetched(self, path: Location, *, content: bool = True) -> Iterator[Path]:
        folder = f"{CHECKPOINTS}/{path.name}"
        with TemporaryDirectory(prefix="trireme-") as temporary:
            directory = Path(temporary, path.name)
            directory.mkdir()
            with self._reading(path):
                sizes = self._store.list(folder)
                if (key := f"{folder}/{STATE}") in sizes:
                    (directory / STATE).write_bytes(self._store.read(key))
            try:
                manifest = read_manifest(directory)
                with self._reading(path):
                    for name in manifest.files:
                        size = sizes.get(f"{folder}/{name}")
                        if size is not None:  # else it is missing, which the reader says
                            whole = content or not name.endswith(SUFFIX)
                            self._copy(f"{folder}/{name}", size, directory / name, whole=whole)
                yield directory
            except CheckpointError as error:
                raise type(error)(str(error).replace(str(directory), str(path))) from error

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

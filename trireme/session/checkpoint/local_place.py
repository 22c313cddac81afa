"""A run directory on a local disk, or on a file system that hosts share."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from tempfile import NamedTemporaryFile

from trireme.errors import CheckpointError
from trireme.session.checkpoint import atomic_directories
from trireme.session.checkpoint.manifest import (
    Manifest,
    checkpoint_directory,
    read_manifest,
    verify_files,
)
from trireme.session.checkpoint.place import Fetched, Fill, Location, Place
from trireme.session.checkpoint.run_lock import RunLock, Writer
from trireme.session.checkpoint.tensors import FileRecord, write_file

_PROBE_BYTES = 4096
_COPY_BYTES = 1 << 20


class LocalPlace(Place):
    """A run directory on a disk.

    Args:
        run_dir: the run directory.
    """

    def __init__(self, run_dir: Path) -> None:
        self.run_dir: Path = run_dir
        self._parent = checkpoint_directory(run_dir)

    def claim(self, writer: Writer, *, first: bool = True) -> RunLock:
        atomic_directories.make_directory(self.run_dir)
        return RunLock.claim(self.run_dir, writer, first=first)

    def prepare(self) -> None:
        atomic_directories.make_directory(self._parent)
        with NamedTemporaryFile(dir=self._parent, prefix=".probe.") as probe:
            probe.write(bytes(_PROBE_BYTES))
            probe.flush()
            os.fsync(probe.fileno())

    def list(self) -> dict[str, Location]:
        try:
            return dict(atomic_directories.list_directories(self._parent))
        except FileNotFoundError:
            return {}

    def checkpoint(self, name: str) -> Path:
        return self._parent / name

    def has(self, path: Location) -> bool:
        try:
            read_manifest(_local(path))
        except CheckpointError:
            return False
        return True

    def write(self, name: str, fill: Fill, allowed: Callable[[], None]) -> Location:
        final = self._parent / name
        atomic_directories.make_directory(self._parent)
        atomic_directories.sweep(self._parent)
        with atomic_directories.staging(self._parent, name) as staged:

            def reuse(source: Location, files: Mapping[str, FileRecord]) -> None:
                for file_name in files:
                    _link(_local(source) / file_name, staged / file_name)

            fill(staged, write_file, reuse)
            atomic_directories.publish(staged, final, allowed)
        return final

    def remove(self, path: Location) -> None:
        atomic_directories.remove(_local(path))

    def fetch(self, path: Location, *, content: bool = True) -> Fetched:
        return Fetched(_local(path), path)

    def verify_content(self, path: Location, manifest: Manifest) -> None:
        verify_files(_local(path), manifest)


def _link(source: Path, target: Path) -> None:
    """Gives a file a second name; copies it where the file system cannot."""
    try:
        os.link(source, target)
    except OSError:
        with source.open("rb") as file:
            write_file(target, iter(partial(file.read, _COPY_BYTES), b""))


def _local(path: Location) -> Path:
    assert isinstance(path, Path)
    return path

"""The places of run directories: a local disk, or one that hosts share, and those of plug-ins.

A directory is published atomically: complete or not at all, even if the process dies. Beside the
published ones lie hidden ones, which `write` deletes where killed processes have left them:

    .saving-NAME             being written
    .removing-NAME.TOKEN     no longer wanted
"""

from __future__ import annotations

import os
import re
import secrets
import shutil
from collections.abc import Iterable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from tempfile import NamedTemporaryFile

from trireme.atomic_file import make_directory, sync_directory
from trireme.errors import CheckpointError
from trireme.location import Location, location
from trireme.session.checkpoint.manifest import (
    CHECKPOINTS,
    order_of,
    read_manifest,
)
from trireme.session.checkpoint.place import Fetched, Fill, Place
from trireme.session.checkpoint.run_lock import LocalClaims
from trireme.session.checkpoint.tensors import FileRecord, write_file
from trireme.stores import open_store

_HIDDEN = re.compile(r"\.(saving-|removing-)(.+?)(\.[0-9a-f]{8})?")
_PROBE_BYTES = 4096
_COPY_BYTES = 1 << 20


class LocalPlace(Place):
    """A run directory on a disk."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir: Path = run_dir
        self.claims = LocalClaims(run_dir)
        self._parent = run_dir / CHECKPOINTS

    def open(self, *, first: bool) -> None:
        make_directory(self.run_dir)

    def prepare(self) -> None:
        make_directory(self._parent)
        with NamedTemporaryFile(dir=self._parent, prefix=".probe.") as probe:
            probe.write(bytes(_PROBE_BYTES))
            probe.flush()
            os.fsync(probe.fileno())

    def folders(self) -> Iterable[Location]:
        try:
            return list(self._parent.iterdir())
        except FileNotFoundError:
            return ()

    def has(self, path: Location) -> bool:
        try:
            read_manifest(_local(path))
        except CheckpointError:
            return False
        return True

    def write(self, name: str, fill: Fill) -> Location:
        final, staged = self._parent / name, self._parent / f".saving-{name}"
        make_directory(self._parent)
        self._sweep(name)
        staged.mkdir()
        try:

            def reuse(source: Location, files: Mapping[str, FileRecord]) -> None:
                for file_name in files:
                    _link(_local(source) / file_name, staged / file_name)

            fill(staged, write_file, reuse)
            sync_directory(staged)
            if os.path.lexists(final):  # its writer has saved the step, and went back behind it
                self.remove(final)
            os.rename(staged, final)
            sync_directory(self._parent)
        finally:
            shutil.rmtree(staged, ignore_errors=True)
        return final

    def _sweep(self, name: str) -> None:
        """Deletes what the writer of a name, and those before it, have left unfinished.

        One that is alive, as it was replaced and stopped, then fails to publish: it finds nothing.
        """
        writer = (order_of(name) or (0, 0))[0]
        for path in list(self._parent.iterdir()):
            if hidden := _HIDDEN.fullmatch(path.name):
                with suppress(OSError):  # what cannot be deleted does no harm
                    if hidden[1] == "removing-":
                        shutil.rmtree(path)
                    elif (order_of(hidden[2]) or (0, 0))[0] <= writer:
                        self.remove(path)

    def remove(self, path: Location) -> None:
        name = path.name.removeprefix(".saving-")
        doomed = self._parent / f".removing-{name}.{secrets.token_hex(4)}"
        os.replace(_local(path), doomed)
        sync_directory(self._parent)
        shutil.rmtree(doomed, ignore_errors=True)

    def fetch(self, path: Location, *, content: bool = True) -> Fetched:
        return Fetched(_local(path), path)


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


RunDir = str | Location | Place
"""What functions take for a run directory: a path, a URL such as `s3://bucket/run`, or a place."""


def place_of(run_dir: RunDir) -> Place:
    """Returns the place of a run directory."""
    if isinstance(run_dir, Place):
        return run_dir
    where = location(run_dir)
    if isinstance(where, Path):
        return LocalPlace(where)
    found = open_store(where).place()
    assert isinstance(found, Place)
    return found


def place_of_checkpoint(path: str | Location) -> tuple[Place, Location]:
    """Returns the place of the run of a checkpoint, and the checkpoint's location."""
    where = location(path)
    return place_of(where.parent.parent), where

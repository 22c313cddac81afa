"""The runs of commands that may be in an object store, as local directories."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import msgspec

from trireme.errors import ConfigurationError
from trireme.launch.run_directory import RECORD, JobRecord, is_running
from trireme.location import RemotePath, location
from trireme.stores import open_store

ELSEWHERE = "running elsewhere"
"""The state of a job whose uploaded record says that it runs, on another host."""


@contextmanager
def local_run(run: str) -> Iterator[Path]:
    """Yields the directory of a run; of one in an object store, of its job's records.

    That is the scratch directory where the job runs on this host, below this working directory, and
    otherwise a copy of what was uploaded, which is deleted after the block.
    """
    where = location(run)
    if isinstance(where, Path):
        yield where
        return
    scratch = where.scratch
    if is_running(scratch):
        yield scratch
        return
    with TemporaryDirectory(prefix="trireme-") as temporary:
        # `report` names a run by its directory.
        directory = Path(temporary, where.name)
        directory.mkdir()
        _fetch(where, directory)
        yield directory


def _fetch(where: RemotePath, directory: Path) -> None:
    try:
        open_store(where).download(directory)
    except OSError as error:
        raise ConfigurationError(f"the run {where} cannot be read: {error}") from error
    file = directory / RECORD
    if not file.exists():
        return
    try:
        record = msgspec.json.decode(file.read_bytes(), type=JobRecord)
    except (msgspec.MsgspecError, UnicodeError):
        return  # told by who reads it
    if record.state == "running" and record.host != socket.gethostname():
        file.write_bytes(msgspec.json.encode(msgspec.structs.replace(record, state=ELSEWHERE)))

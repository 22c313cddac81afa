"""The run that a command names: its records, wherever it is, and the status of its running job."""

from __future__ import annotations

import math
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING

import msgspec

from trireme.certificates import Certificates
from trireme.cli.command import number
from trireme.errors import ConfigurationError
from trireme.launch.config.secret import read_private, read_secret
from trireme.launch.run_directory import RECORD, JobRecord, is_running
from trireme.location import RemotePath, location, open_store

if TYPE_CHECKING:
    from trireme.cluster.member import Observer
    from trireme.cluster.messages import ClusterStatus

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


def query(record: JobRecord, timeout: float = 5.0) -> ClusterStatus:
    """Asks the coordinator of a running job for the job's status."""
    return observer(record, timeout).query_status()


def observer(record: JobRecord, timeout: float = 5.0) -> Observer:
    """Returns an observer of a running job, which may ask its coordinator."""
    from trireme.cluster.member import Observer

    secret = bytes.fromhex(read_secret(Path(record.secret_file)))
    certificates = None
    if record.certificate_file:
        file = Path(record.certificate_file)
        certificates = Certificates(read_private(file, "the observer's key", "run the job again"))
    return Observer(record.coordinator, record.job, secret, certificates, timeout)


def timeout_seconds(timeout: str) -> float:
    """Returns the value of the option `--timeout`."""
    return number("--timeout", timeout, "a number of seconds", lambda n: 0 <= n < math.inf)

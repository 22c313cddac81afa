"""What a job's launcher keeps in the run directory: the logs, and `job.json`, which describes it.

One launcher uses a run directory at a time. It holds a lock for as long as it lives, so that no
other process has to guess from a process id whether the job still runs.
"""

from __future__ import annotations

import os
import time
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain, count
from pathlib import Path
from typing import IO, Any

import msgspec

from trireme.errors import ConfigurationError
from trireme.files import PRIVATE, is_locked, open_lock, open_regular, try_lock, write_atomically
from trireme.host import Moment
from trireme.launch.config.secret import SECRET_FILE

RECORD = "job.json"
LOCK = "job.lock"
CERTIFICATE = "job.pem"


class JobRecord(msgspec.Struct, frozen=True, kw_only=True):
    """The job that runs, or ran last, in a run directory. Times are in seconds since 1970."""

    job: str
    state: str  # `running`, `finished`, `failed`, `interrupted`; `lost`: its launcher was killed
    status: int | None  # the launcher's exit status
    host: str  # of the launcher
    launcher: int  # its process id
    launcher_birth: str = ""  # see `process_birth`
    command: tuple[str, ...]
    options: dict[str, Any]
    origins: dict[str, str]  # of each option's value
    started: Moment
    ended: Moment | None = None
    coordinator: str  # its address; empty where there is none
    secret_file: str  # holds the job's secret while it runs
    certificate_file: str = ""  # an observer's key and certificate, where the job uses TLS
    pids: dict[str, int]  # of every task, by name
    nodes: dict[str, str] = {}  # the node of every task that is not on `host`
    failure: tuple[str, ...] = ()  # the lines of the failure report
    traceback: str = ""  # of the task that failed first
    events: tuple[tuple[float, str], ...] = ()
    """The newest of what the launcher told of its tasks, with the seconds since the start."""


@dataclass(frozen=True, slots=True)
class RunDirectory:
    """A run directory that this process has claimed; `release` gives it back."""

    path: Path
    lock: IO[str]

    @property
    def secret_file(self) -> Path:
        return self.path / SECRET_FILE

    @property
    def certificate_file(self) -> Path:
        """Holds an observer's key and certificate."""
        return self.path / CERTIFICATE

    def log(self, name: str) -> Path:
        """Returns the file for the output of a task, such as `logs/worker-1.log`."""
        return task_log(self.path, name)

    def write_secret(self, secret: str) -> None:
        self._write_private(self.secret_file, secret.encode() + b"\n")

    def write_certificate(self, pem: str) -> None:
        self._write_private(self.certificate_file, pem.encode())

    def _write_private(self, path: Path, content: bytes) -> None:
        try:
            write_atomically(path, content, PRIVATE)
        except OSError as error:
            raise _unwritable(self.path, error) from error

    def write_record(self, record: JobRecord) -> None:
        text = msgspec.json.format(msgspec.json.encode(record), indent=2)
        write_atomically(self.path / RECORD, text + b"\n", PRIVATE)

    def release(self) -> None:
        """Removes the secret and the certificate, and releases the lock."""
        with suppress(NotADirectoryError):  # a file has its place: they are gone with it
            self.secret_file.unlink(missing_ok=True)
            self.certificate_file.unlink(missing_ok=True)
        self.lock.close()


def task_log(run: Path, name: str) -> Path:
    """Returns the file for the output of a task in a run directory."""
    return run / "logs" / f"{name.replace(':', '-').replace('/', '-')}.log"


def claim(path: Path) -> RunDirectory:
    """Creates a run directory if it does not exist, and locks it for this process."""
    try:
        (path / "logs").mkdir(parents=True, exist_ok=True)
        lock = os.fdopen(open_lock(str(path / LOCK), os.O_WRONLY | os.O_CREAT), "a")
    except OSError as error:
        raise _unwritable(path, error) from error
    if not _lock(lock):
        lock.close()
        raise ConfigurationError(
            f"a job runs in {path} already: end it with `trireme stop {path}`, "
            "or name another directory with --run-dir"
        )
    return RunDirectory(path, lock)


def _unwritable(path: Path, error: OSError) -> ConfigurationError:
    return ConfigurationError(
        f"the run directory {path} cannot be written: {error}. Name another with --run-dir"
    )


def _lock(file: IO[str]) -> bool:
    """Takes the lock and keeps it; returns False if another launcher has it."""
    for _ in range(10):
        with suppress(OSError):  # this file system has no locks
            if try_lock(file.fileno()):
                return True
        time.sleep(0.01)  # another process's `is_running` holds it for a moment
    return False


def claim_free(path: Path) -> RunDirectory:
    """Claims `path`, or `path-2`, `path-3` and so on where jobs run already."""
    others = (path.with_name(f"{path.name}-{number}") for number in count(2))
    return claim(next(each for each in chain([path], others) if not is_running(each)))


def is_running(path: Path) -> bool:
    """Returns whether the launcher of a job in this run directory lives."""
    return is_locked(path / LOCK)


def read_record(path: Path) -> JobRecord:
    """Returns the record in `job.json` of a run directory."""
    file = path / RECORD
    try:
        with open_regular(file) as opened:
            record = msgspec.json.decode(opened.read(), type=JobRecord)
    except FileNotFoundError as error:
        raise ConfigurationError(
            f"no job was started in {path}: it has no {RECORD}. Give the directory that "
            "`trireme run` named, or wait a moment if it has only just been called; "
            "`trireme top` and `trireme report` also read a program's own run directory"
        ) from error
    except (OSError, msgspec.MsgspecError, UnicodeError) as error:
        raise ConfigurationError(f"{file} cannot be read: {error}") from error
    if record.state == "running" and not is_running(path):
        return msgspec.structs.replace(record, state="lost")
    return record

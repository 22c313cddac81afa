"""The job's secret, which two tasks must share before they talk to each other.

It never appears on a command line, where every user of the machine could read it. A task gets it
in a file without a name, which only processes that inherit its descriptor can read.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import msgspec

from trireme.errors import ConfigurationError
from trireme.launch.config.task_config import TaskConfig

SECRET_VARIABLE = "TRIREME_SECRET"
SECRET_FILE = "job.secret"  # with a job's secret, in its run directory or beside its certificates

MARK = "trireme secret"
_SECRET_BYTES = 1 << 16  # more than a secret and the certificates have


def fresh_secret() -> str:
    """Returns the text of a new secret of 256 bits, as it stands in a file for `read_secret`."""
    return secrets.token_hex(32)


def read_secret(path: Path) -> str:
    """Returns the secret whose text is in a file, in hexadecimal digits."""
    return read_private(path, "the secret", "start the job again").strip().encode().hex()


def read_private(path: Path, what: str, advice: str) -> str:
    """Returns the text of a file that only this user can read."""
    try:
        with path.open(encoding="utf-8") as file:
            mode = os.fstat(file.fileno())
            text = file.read()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"{what} cannot be read from {path}: {error}") from error
    if mode.st_uid not in (os.getuid(), 0) or mode.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise ConfigurationError(
            f"{what} in {path} can be read by other users of this machine: they may have it "
            f"already. {advice[0].upper()}{advice[1:]}"
        )
    return text


def nameless_file(what: str) -> IO[bytes]:
    """Returns an empty, unbuffered file without a name, gone when the last process closes it."""
    if hasattr(os, "memfd_create"):
        return os.fdopen(os.memfd_create(f"trireme-{what}"), "w+b", buffering=0)
    return tempfile.TemporaryFile(buffering=0)


@contextlib.contextmanager
def secret_descriptor(task: TaskConfig) -> Iterator[TaskConfig]:
    """Gives a task's configuration with its secret and certificates in an inherited descriptor.

    Every process that the task starts would inherit a variable, and the system would show it.
    """
    if not task.secret:
        yield task
        return
    with nameless_file("secret") as file:
        file.write(f"{MARK} {task.job} {task.secret}\n{task.certificates}".encode())
        bare = msgspec.structs.replace(task, secret="", certificates="")
        yield bare.inheriting(secret=file.fileno())


def receive_secret(fd: int, job: str) -> tuple[str, str]:
    """Returns the secret and the certificates in a descriptor, which no child inherits now."""
    try:
        text = os.pread(fd, _SECRET_BYTES, 0).decode("ascii", "replace")
        os.set_inheritable(fd, False)
    except OSError:
        text = ""
    line, _, certificates = text.partition("\n")
    words = line.rpartition(" ")
    if words[0] != f"{MARK} {job}":
        raise ConfigurationError(
            "this process was started by a task of a job, and is not that task: start it without "
            "the environment variable TRIREME_TASK, to have it train by itself"
        )
    return words[2], certificates

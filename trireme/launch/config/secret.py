"""The job's secret, which two tasks must share before they talk to each other.

It never appears on a command line, where every user of the machine could read it.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
import string
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import msgspec

from trireme.errors import ConfigurationError
from trireme.launch.config.task_config import TaskConfig
from trireme.launch.nameless_file import nameless_file

SECRET_VARIABLE = "TRIREME_SECRET"
SECRET_FILE = "job.secret"
"""The name of the file that holds a job's secret, in a directory of certificates."""

LEAST_DISTINCT = 8
"""Of so many different characters at least consists a random text of 128 bits."""

MARK = "trireme secret"
_SECRET_BYTES = 1 << 16  # more than a secret and the certificates have


def fresh_secret() -> str:
    """Returns the text of a new secret of 256 bits, as it stands in a file for `read_secret`."""
    return secrets.token_hex(32)


def find_secret(
    file: Path | None,
    environ: Mapping[str, str],
    *,
    loopback: bool,
    certificates: Path | None = None,
) -> str:
    """Returns the secret of a job started by hand, in hexadecimal digits.

    Where all tasks are on this host (`loopback`) and none was given, a file of this user's serves,
    which is created when it is first needed.
    """
    if file is not None:
        return read_secret(file)
    if SECRET_VARIABLE in environ:
        return _checked(environ[SECRET_VARIABLE].strip(), SECRET_VARIABLE)
    if certificates is not None and (certificates / SECRET_FILE).exists():
        return read_secret(certificates / SECRET_FILE)
    if not loopback:
        raise ConfigurationError(
            "the tasks of this job are on several hosts, and no secret was given: `trireme certs "
            f"init DIR` makes one, DIR/{SECRET_FILE}; copy it to every host, beside the task's "
            "certificate or anywhere with --secret-file FILE, for yourself alone; or set "
            f"{SECRET_VARIABLE}"
        )
    base = environ.get("XDG_CONFIG_HOME", "")  # by the XDG base directory specification
    home = Path(base) if os.path.isabs(base) else Path.home() / ".config"
    return user_secret(home / "trireme" / "secret")


def read_secret(path: Path) -> str:
    """Returns the secret whose text is in a file, in hexadecimal digits."""
    advice = (
        f"make a new one that only you can read: `(umask 077; openssl rand -hex 32 > {path}.new)`"
    )
    text = read_private(path, "the secret", advice).strip()
    return _checked(text, str(path))


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


def _checked(text: str, origin: str) -> str:
    least = 32 if set(text) <= set(string.hexdigits) else 22
    if len(text) < least or len(set(text)) < LEAST_DISTINCT:
        raise ConfigurationError(
            f"the secret in {origin} can be guessed: 128 bits are needed, {least} random "
            "characters; `openssl rand -hex 32` makes a good one"
        )
    return text.encode().hex()


@contextlib.contextmanager
def secret_descriptor(task: TaskConfig) -> Iterator[TaskConfig]:
    """Gives a task's configuration with a descriptor, which the task inherits, for its secret.

    Its certificates, with their key, are there too.

    An environment variable would be inherited by every process that the task starts, and the
    system would show it. Without a secret the configuration is unchanged.
    """
    if not task.secret:
        yield task
        return
    with nameless_file("secret") as file:
        file.write(f"{MARK} {task.job} {task.secret}\n{task.certificates}".encode())
        bare = msgspec.structs.replace(task, secret="", certificates="")
        yield bare.inheriting(secret=file.fileno())


def receive_secret(fd: int, job: str) -> tuple[str, str]:
    """Returns the secret and the certificates that a launcher left in a descriptor.

    Stops children inheriting it.
    """
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


def user_secret(path: Path) -> str:
    """Returns this user's own secret, in hexadecimal digits; creates the file if there is none.

    Several processes that create it at the same time all return the same secret.
    """
    try:
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            with tempfile.NamedTemporaryFile("w", dir=path.parent, prefix=".secret-") as file:
                file.write(fresh_secret() + "\n")  # only this user can read it
                file.flush()
                with contextlib.suppress(FileExistsError):  # another process has made it by now
                    os.link(file.name, path)
    except OSError as error:
        raise ConfigurationError(
            f"no secret was given, and {path} cannot be made: {error}. Give one with "
            f"--secret-file or {SECRET_VARIABLE}"
        ) from error
    return read_secret(path)

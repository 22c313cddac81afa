"""The job's secret: what two tasks must share before they talk to each other.

It never stands on a command line, where every user of the machine could read it.
"""

from __future__ import annotations

import os
import secrets
import stat
import tempfile
from collections.abc import Mapping
from pathlib import Path

from trireme.errors import ConfigurationError

__all__ = ["SECRET_VARIABLE", "find_secret", "fresh_secret", "read_secret", "user_secret"]

SECRET_VARIABLE = "TRIREME_SECRET"
SHORTEST = 16


def fresh_secret() -> str:
    """Returns the text of a new secret of 256 bits, as `read_secret` finds it in a file."""
    return secrets.token_hex(32)


def find_secret(
    file: Path | None, environ: Mapping[str, str], *, loopback: bool
) -> tuple[str, str]:
    """Returns the secret of a job started by hand, in hexadecimal digits, and its origin.

    Args:
        file: the file that the user named, if any.
        environ: the environment, which may hold `TRIREME_SECRET`.
        loopback: whether every task of the job is on this host; then a file of this user's, made
            when it is first needed, serves where no secret was given.

    Raises:
        ConfigurationError: no secret was given and one is needed, or it is too short, or its
            file cannot be read.
    """
    if file is not None:
        return read_secret(file), f"file {file}"
    if SECRET_VARIABLE in environ:
        text = environ[SECRET_VARIABLE].strip()
        return _checked(text, SECRET_VARIABLE), f"environment {SECRET_VARIABLE}"
    if not loopback:
        raise ConfigurationError(
            "the tasks of this job are on several hosts, and no secret was given: write one into "
            "a file (`openssl rand -hex 32 > job.secret`), copy it to every host and give each "
            f"task --secret-file job.secret, or set {SECRET_VARIABLE}"
        )
    return _user_secret(environ)


def read_secret(path: Path) -> str:
    """Returns the secret whose text is in a file, in hexadecimal digits.

    Raises:
        ConfigurationError: the file cannot be read, or holds less than 16 characters.
    """
    try:
        text = path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"the secret cannot be read from {path}: {error}") from error
    return _checked(text, str(path))


def _checked(text: str, origin: str) -> str:
    if len(text) < SHORTEST:
        raise ConfigurationError(
            f"the secret in {origin} has {len(text)} characters, and fewer than {SHORTEST} can "
            "be guessed: `openssl rand -hex 32` makes a good one"
        )
    return text.encode().hex()


def user_secret_path(environ: Mapping[str, str]) -> Path:
    """Returns where this user's own secret lies, by the XDG base directory specification."""
    base = environ.get("XDG_CONFIG_HOME", "")
    home = Path(base) if os.path.isabs(base) else Path.home() / ".config"
    return home / "trireme" / "secret"


def _user_secret(environ: Mapping[str, str]) -> tuple[str, str]:
    path = user_secret_path(environ)
    return user_secret(path), f"file {path}"


def user_secret(path: Path) -> str:
    """Returns this user's own secret, in hexadecimal digits; makes the file if it is not there.

    Of several processes that make it at the same time one wins, and all return the same.

    Raises:
        ConfigurationError: the file cannot be made or read, or other users can read it.
    """
    try:
        if not path.exists():
            _create(path)
        mode = path.stat()
    except OSError as error:
        raise ConfigurationError(
            f"no secret was given, and {path} cannot be made: {error}. Give one with "
            f"--secret-file or {SECRET_VARIABLE}"
        ) from error
    if mode.st_uid != os.getuid() or mode.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise ConfigurationError(
            f"{path} must belong to you and be readable by nobody else: remove it, or "
            f"`chmod 600 {path}`"
        )
    return read_secret(path)


def _create(path: Path) -> None:
    """Writes a new secret to `path` unless another process was faster."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=".secret-")  # mode 0600
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(fresh_secret() + "\n")
        try:
            os.link(name, path)  # unlike a rename, fails if the file is there
        except FileExistsError:
            return
    finally:
        os.unlink(name)

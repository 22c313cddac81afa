"""The secret of a job that is started by hand."""

from __future__ import annotations

import contextlib
import os
import string
import tempfile
from collections.abc import Mapping
from pathlib import Path

from trireme.errors import ConfigurationError
from trireme.launch.config.secret import SECRET_FILE, SECRET_VARIABLE, fresh_secret, read_private

_LEAST_DISTINCT = 8  # of so many different characters at least consists a random text of 128 bits


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
        return read_given(file)
    if SECRET_VARIABLE in environ:
        return _checked(environ[SECRET_VARIABLE].strip(), SECRET_VARIABLE)
    if certificates is not None and (certificates / SECRET_FILE).exists():
        return read_given(certificates / SECRET_FILE)
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


def read_given(path: Path) -> str:
    """Returns the secret whose text is in a file, in hexadecimal digits."""
    advice = (
        f"make a new one that only you can read: `(umask 077; openssl rand -hex 32 > {path}.new)`"
    )
    text = read_private(path, "the secret", advice).strip()
    return _checked(text, str(path))


def _checked(text: str, origin: str) -> str:
    least = 32 if set(text) <= set(string.hexdigits) else 22
    if len(text) < least or len(set(text)) < _LEAST_DISTINCT:
        raise ConfigurationError(
            f"the secret in {origin} can be guessed: 128 bits are needed, {least} random "
            "characters; `openssl rand -hex 32` makes a good one"
        )
    return text.encode().hex()


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
    return read_given(path)

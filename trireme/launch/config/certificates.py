"""The directory of a job's certificates, as `trireme certs` makes it and tasks find theirs in it.

    ca.pem          the authority's certificate
    ca.key          its key, which stays on the host where it was made
    job.secret      the job's secret
    worker-0.pem    for worker:0 alone: its key, its certificate, the authority's certificate

A task needs its own file and the secret. Only the user can read any of them.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

from trireme.errors import ConfigurationError
from trireme.launch.config.authority import Authority, CertificateFacts, read_facts
from trireme.launch.config.secret import SECRET_FILE, fresh_secret, read_private

AUTHORITY_FILE = "ca.pem"
AUTHORITY_KEY_FILE = "ca.key"
SOON = timedelta(days=7)
"""How long before a certificate's end its task warns."""

_log = logging.getLogger(__name__)


def make_authority(directory: Path, days: float) -> list[Path]:
    """Makes a job's authority and its secret in a directory, which is created if need be."""
    try:
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        raise ConfigurationError(f"{directory} cannot be made: {error.strerror}") from error
    authority = Authority.make(days)
    texts = {
        AUTHORITY_KEY_FILE: authority.key,
        AUTHORITY_FILE: authority.certificate,
        SECRET_FILE: fresh_secret() + "\n",
    }
    for name in texts:
        if (directory / name).exists():
            raise _exists(directory / name)
    return [_write_new(directory / name, text) for name, text in texts.items()]


def open_authority(directory: Path) -> Authority:
    """Returns the authority whose files are in a directory."""
    if not (directory / AUTHORITY_KEY_FILE).exists():
        raise ConfigurationError(
            f"{directory} has no authority's key ({AUTHORITY_KEY_FILE}): make one with `trireme "
            f"certs init {directory}`, or issue on the host where that was done"
        )
    key = read_private(directory / AUTHORITY_KEY_FILE, "the authority's key", "make a new one")
    certificate = read_private(directory / AUTHORITY_FILE, "the authority", "make a new one")
    return Authority(certificate, key)


def issue(
    directory: Path, tasks: Sequence[str], hosts: Sequence[str], days: float | None
) -> list[Path]:
    """Issues each task a key and a certificate, in a file of its own."""
    authority = open_authority(directory)
    texts = {task: authority.issue(task, hosts, days) for task in tasks}
    for task in texts:
        if certificate_file(directory, task).exists():
            raise _exists(certificate_file(directory, task))
    return [_write_new(certificate_file(directory, task), text) for task, text in texts.items()]


def certificate_file(directory: Path, task: str) -> Path:
    """Returns the file of a task's certificate, such as `DIR/worker-0.pem`."""
    return directory / f"{task.replace(':', '-')}.pem"


def read_certificate(path: Path, task: str, now: datetime | None = None) -> str:
    """Returns a task's key, certificate and authority's certificate in PEM."""
    file = certificate_file(path, task) if path.is_dir() else path
    directory = path if path.is_dir() else path.parent
    again = f"issue it again with `trireme certs issue {directory} --task {task}`"
    if not file.exists():
        raise ConfigurationError(
            f"{task} has no certificate at {file}: issue one with `trireme certs issue DIR --task "
            f"{task}` on the host of the authority, and copy it here"
        )
    text = read_private(file, f"the key of {task}", again)
    facts = read_facts(text)[0]
    if task not in facts.tasks:
        own = " and ".join(facts.tasks) or "no task"
        raise ConfigurationError(f"the certificate in {file} is for {own}, and not for {task}")
    now = now or datetime.now(UTC)
    if problem := facts.problem(now):
        raise ConfigurationError(f"the certificate in {file} {problem}: {again}")
    if now > facts.end - SOON:
        end = f"{facts.end:%Y-%m-%d %H:%M}"
        _log.warning("the certificate in %s ends on %s UTC: %s", file, end, again)
    return text


def show(directory: Path) -> list[tuple[Path, CertificateFacts | None]]:
    """Returns what each file with a certificate in a directory says; None where it is none."""
    try:
        files = sorted(each for each in directory.iterdir() if each.suffix == ".pem")
    except OSError as error:
        raise ConfigurationError(f"{directory} cannot be read: {error.strerror}") from error
    if not files:
        raise ConfigurationError(
            f"there is no certificate in {directory}: `trireme certs init {directory}` begins"
        )
    found: list[tuple[Path, CertificateFacts | None]] = []
    for file in files:
        try:
            found.append((file, read_facts(file.read_text(encoding="ascii"))[0]))
        except (OSError, UnicodeError, ConfigurationError):
            found.append((file, None))
    return found


def _exists(path: Path) -> ConfigurationError:
    return ConfigurationError(
        f"{path} exists already and is kept: remove it first, or name another directory"
    )


def _write_new(path: Path, text: str) -> Path:
    try:
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except FileExistsError as error:
        raise _exists(path) from error
    except OSError as error:
        raise ConfigurationError(f"{path} cannot be written: {error.strerror}") from error
    try:
        with os.fdopen(handle, "w", encoding="ascii") as file:
            file.write(text)
    except OSError as error:
        path.unlink(missing_ok=True)
        raise ConfigurationError(f"{path} cannot be written: {error.strerror}") from error
    return path

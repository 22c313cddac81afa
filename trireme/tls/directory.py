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
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

from trireme.errors import ConfigurationError
from trireme.launch.config.secret import SECRET_FILE, fresh_secret, read_private
from trireme.tls.authority import CertificateFacts, JobAuthority, read_facts

_AUTHORITY, _KEY = "ca.pem", "ca.key"
_SOON = timedelta(days=7)  # how long before a certificate's end its task warns

_log = logging.getLogger(__name__)


def make_authority(directory: Path, days: float) -> list[Path]:
    """Makes a job's authority and its secret in a directory, which is created if need be."""
    try:
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        raise ConfigurationError(f"{directory} cannot be made: {error.strerror}") from error
    made = JobAuthority.make(days)
    secret = fresh_secret() + "\n"
    return _write_new(
        directory, {_KEY: made.key, _AUTHORITY: made.certificate, SECRET_FILE: secret}
    )


def issue(directory: Path, tasks: Sequence[str], days: float | None) -> list[Path]:
    """Issues each task a key and a certificate, in a file of its own."""
    if not (directory / _KEY).exists():
        raise ConfigurationError(
            f"{directory} has no authority's key ({_KEY}): make one with `trireme certs init "
            f"{directory}`, or issue on the host where that was done"
        )
    authority = JobAuthority(
        read_private(directory / _AUTHORITY, "the authority", "make a new one"),
        read_private(directory / _KEY, "the authority's key", "make a new one"),
    )
    return _write_new(directory, {_name(task): authority.issue(task, days) for task in tasks})


def read_certificate(path: Path, task: str, now: datetime | None = None) -> str:
    """Returns a task's key, certificate and authority's certificate, from a file or directory."""
    file = path / _name(task) if path.is_dir() else path
    again = f"issue it again with `trireme certs issue {file.parent} --task {task}`"
    if not file.exists():
        raise ConfigurationError(
            f"{task} has no certificate at {file}: issue one with `trireme certs issue DIR --task "
            f"{task}` on the host of the authority, and copy it here"
        )
    text = read_private(file, f"the key of {task}", again)
    facts = read_facts(text)
    if task not in facts.tasks:
        own = " and ".join(facts.tasks) or "no task"
        raise ConfigurationError(f"the certificate in {file} is for {own}, and not for {task}")
    now = now or datetime.now(UTC)
    if problem := facts.problem(now):
        raise ConfigurationError(f"the certificate in {file} {problem}: {again}")
    if now > facts.end - _SOON:
        end = f"{facts.end:%Y-%m-%d %H:%M}"
        _log.warning("the certificate in %s ends on %s UTC: %s", file, end, again)
    return text


def certificates_in(directory: Path) -> Iterator[tuple[Path, CertificateFacts | None]]:
    """Yields what each certificate in a directory says; None where it is damaged."""
    files = sorted(directory.glob("*.pem"))
    if not files:
        raise ConfigurationError(
            f"there is no certificate in {directory}: `trireme certs init {directory}` begins"
        )
    for file in files:
        try:
            yield file, read_facts(file.read_text(encoding="ascii"))
        except (OSError, UnicodeError, ConfigurationError):
            yield file, None


def _name(task: str) -> str:
    return f"{task.replace(':', '-')}.pem"


def _write_new(directory: Path, texts: Mapping[str, str]) -> list[Path]:
    files = [directory / name for name in texts]
    if there := [file for file in files if file.exists()]:
        raise ConfigurationError(
            f"{there[0]} exists already and is kept: remove it first, or name another directory"
        )
    for file, text in zip(files, texts.values(), strict=True):
        try:
            handle = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            with os.fdopen(handle, "w", encoding="ascii") as opened:
                opened.write(text)
        except OSError as error:
            raise ConfigurationError(f"{file} cannot be written: {error.strerror}") from error
    return files

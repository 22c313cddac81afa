"""Checks of a directory of certificates: what they are, until when they hold, who can read keys."""

from __future__ import annotations

import os
import stat
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from trireme.doctor.check import Check

SOON = timedelta(days=7)
SUFFIXES = (".pem", ".crt", ".cert", ".key")


@dataclass(frozen=True, slots=True)
class CertificateFacts:
    """A file in a directory of certificates.

    Attributes:
        name: the file.
        subject: whom it is for; empty if it holds no certificate.
        begins, ends: when it is valid; None if it holds no certificate.
        private: whether it holds a private key.
        mode: the file's mode.
        failure: why it cannot be read; empty if it can.
    """

    name: str
    subject: str = ""
    begins: datetime | None = None
    ends: datetime | None = None
    private: bool = False
    mode: int = 0o600
    failure: str = ""


def read_certificates(directory: Path) -> list[CertificateFacts]:
    """Reads every file of certificates and keys in a directory.

    Raises:
        ImportError: the package cryptography is not installed.
        OSError: the directory cannot be read.
    """
    paths = sorted(each for each in directory.iterdir() if each.suffix in SUFFIXES)
    return [_read(path) for path in paths]


def _read(path: Path) -> CertificateFacts:
    from cryptography import x509

    try:
        with path.open("rb") as file:
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
            text = file.read()
        private = b"PRIVATE KEY-----" in text
        if b"-----BEGIN CERTIFICATE-----" not in text:
            failure = "" if private else "it holds neither a certificate nor a key"
            return CertificateFacts(path.name, private=private, mode=mode, failure=failure)
        found = x509.load_pem_x509_certificate(text)
    except (OSError, ValueError) as error:
        return CertificateFacts(path.name, failure=str(error))
    return CertificateFacts(
        path.name,
        found.subject.rfc4514_string() or "(no subject)",
        found.not_valid_before_utc,
        found.not_valid_after_utc,
        private,
        mode,
    )


def check_certificates(files: list[CertificateFacts], now: datetime | None = None) -> list[Check]:
    """Checks each file: its dates by the time `now`, and who can read a private key."""
    now = now or datetime.now(UTC)
    if not files:
        advice = "name the directory that holds the job's certificates and keys"
        return [Check("certificates", "problem", "no certificate and no key is there", advice)]
    return [_check(each, now) for each in files]


def _check(file: CertificateFacts, now: datetime) -> Check:
    again = "issue it again"
    if file.failure:
        return Check(file.name, "problem", f"it cannot be read: {file.failure}", again)
    if file.private and file.mode & (stat.S_IRWXG | stat.S_IRWXO):
        finding = f"other users can read this private key (mode {file.mode:03o})"
        return Check(file.name, "problem", finding, f"chmod 600 {file.name}, and {again}")
    if file.begins is None or file.ends is None:
        return Check(file.name, "ok", "a private key, which only this user can read")
    who, until = f"{file.subject}, until {file.ends:%Y-%m-%d %H:%M} UTC", file.ends - now
    if file.begins > now:
        advice = f"set this host's clock, or {again}"
        return Check(file.name, "problem", f"{who}, is not valid yet", advice)
    if until <= timedelta(0):
        return Check(file.name, "problem", f"{who}, has expired", again)
    if until < SOON:
        return Check(file.name, "warning", f"{who}, expires soon", again)
    return Check(file.name, "ok", who)

"""What the checks of certificates say: of facts, and of files that `cryptography` has made."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from trireme.doctor.certificates import CertificateFacts, check_certificates, read_certificates

NOW = datetime(2030, 1, 1, tzinfo=UTC)
DAY = timedelta(days=1)


def certificate(begins: timedelta, ends: timedelta) -> CertificateFacts:
    return CertificateFacts("ps-0.pem", "CN=ps:0", NOW + begins, NOW + ends, mode=0o644)


@pytest.mark.parametrize(
    ("file", "level", "words"),
    [
        (certificate(-DAY, 30 * DAY), "ok", "CN=ps:0, until 2030-01-31"),
        (certificate(-DAY, 6 * DAY), "warning", "expires soon"),
        (certificate(-DAY, -DAY), "problem", "has expired"),
        (certificate(DAY, 30 * DAY), "problem", "is not valid yet"),
        (CertificateFacts("k.key", private=True, mode=0o600), "ok", "a private key"),
        (CertificateFacts("k.key", private=True, mode=0o640), "problem", "(mode 640)"),
        (CertificateFacts("x.pem", failure="it is empty"), "problem", "it is empty"),
    ],
    ids=["valid", "soon", "expired", "early", "key", "open key", "unreadable"],
)
def test_checks(file: CertificateFacts, level: str, words: str) -> None:
    (check,) = check_certificates([file], NOW)
    assert check.level == level
    assert words in check.finding
    assert bool(check.advice) == (level != "ok")


def test_an_empty_directory_is_a_problem(tmp_path: Path) -> None:
    (check,) = check_certificates([], NOW)
    assert check.level == "problem"


def test_files_are_read(tmp_path: Path) -> None:
    pytest.importorskip("cryptography")
    from cryptography import x509
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.x509.oid import NameOID

    key = Ed25519PrivateKey.generate()
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "ps-0")])
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(NOW)
        .not_valid_after(NOW + DAY)
        .sign(key, None)
    )
    (tmp_path / "a.pem").write_bytes(made.public_bytes(serialization.Encoding.PEM))
    secret = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    (tmp_path / "b.key").write_bytes(secret)
    (tmp_path / "b.key").chmod(0o604)
    (tmp_path / "c.pem").write_text("no such thing")
    (tmp_path / "d.pem").write_text("-----BEGIN CERTIFICATE-----\n!\n-----END CERTIFICATE-----\n")
    (tmp_path / "README").write_text("ignored")
    a, b, c, d = read_certificates(tmp_path)
    assert (a.subject, a.begins, a.ends, a.private) == ("CN=ps-0", NOW, NOW + DAY, False)
    assert (b.private, b.mode, b.subject) == (True, 0o604, "")
    assert c.failure and d.failure

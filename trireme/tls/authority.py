"""A job's own certificate authority, and the certificates that it issues to the job's tasks.

A certificate is for one task, whose name it carries as a URI; the one of `ps:0` is for the
coordinator too. A task gets one text with its key, its certificate and the authority's certificate.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    load_pem_private_key,
)
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from trireme.cluster.spec import ROLES
from trireme.errors import ConfigurationError
from trireme.tls.transport import TASK_URI

AUTHORITY_DAYS = 365
_NAME = re.compile(rf"({'|'.join((*ROLES, 'observer'))}):(0|[1-9][0-9]{{0,4}})", re.ASCII)
_EARLIER = timedelta(hours=1)  # clocks of other hosts may be behind by so much
_USES = (
    *("digital_signature", "content_commitment", "key_encipherment", "data_encipherment"),
    *("key_agreement", "key_cert_sign", "crl_sign", "encipher_only", "decipher_only"),
)


@dataclass(frozen=True, slots=True)
class CertificateFacts:
    """What a certificate says."""

    tasks: tuple[str, ...]  # that it is for; none: it is an authority's
    begin: datetime
    end: datetime

    def problem(self, now: datetime) -> str:
        """Returns why it is not valid at a time; "" if it is."""
        if now < self.begin:
            return f"is valid from {self.begin:%Y-%m-%d %H:%M} UTC only: check this host's clock"
        return f"expired on {self.end:%Y-%m-%d %H:%M} UTC" if now >= self.end else ""


class JobAuthority:
    """A job's certificate authority."""

    def __init__(self, certificate: str, key: str) -> None:
        self.certificate = certificate
        self.key = key
        try:
            self._certificate = x509.load_pem_x509_certificate(certificate.encode())
            own = load_pem_private_key(key.encode(), None)
        except (ValueError, TypeError) as error:
            raise ConfigurationError(
                f"this is no authority's certificate and key: {error}"
            ) from error
        if (
            not isinstance(own, ec.EllipticCurvePrivateKey)
            or own.public_key() != self._certificate.public_key()
        ):
            raise ConfigurationError("the authority's key is not that of its certificate")
        self._key = own

    def __repr__(self) -> str:
        return "JobAuthority(...)"

    @classmethod
    def make(cls, days: float = AUTHORITY_DAYS) -> JobAuthority:
        key = ec.generate_private_key(ec.SECP256R1())
        name = _named("trireme job authority")
        builder = _builder(name, name, key, _now() + timedelta(days=days), "key_cert_sign")
        certificate = builder.add_extension(
            x509.BasicConstraints(ca=True, path_length=0), critical=True
        ).sign(key, hashes.SHA256())
        return cls(_pem(certificate), _key_pem(key))

    def issue(self, task: str, days: float | None = None) -> str:
        if _NAME.fullmatch(task) is None:
            raise ConfigurationError(
                f"{task!r} is no task: name one as ROLE:INDEX, such as worker:0; the roles are "
                f"{', '.join(ROLES)}"
            )
        last = self._certificate.not_valid_after_utc
        end = last if days is None else _now() + timedelta(days=days)
        if end > last:
            raise ConfigurationError(
                f"the authority ends on {last:%Y-%m-%d}, before {days:g} days are over: issue for "
                "fewer days, or make a new authority"
            )
        tasks = (task, "coordinator:0") if task == "ps:0" else (task,)
        names = [x509.UniformResourceIdentifier(f"{TASK_URI}{each}") for each in tasks]
        key = ec.generate_private_key(ec.SECP256R1())
        both = [ExtendedKeyUsageOID.SERVER_AUTH, ExtendedKeyUsageOID.CLIENT_AUTH]
        authority = x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key())
        subject = self._certificate.subject
        certificate = (
            _builder(_named(task), subject, key, end, "digital_signature")
            .add_extension(x509.SubjectAlternativeName(names), critical=False)
            .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
            .add_extension(x509.ExtendedKeyUsage(both), critical=False)
            .add_extension(authority, critical=False)
            .sign(self._key, hashes.SHA256())
        )
        return _key_pem(key) + _pem(certificate) + self.certificate


def read_facts(pem: str) -> CertificateFacts:
    """Returns what the first certificate in a text says."""
    try:
        certificate = x509.load_pem_x509_certificate(pem.encode())
    except ValueError as error:
        raise ConfigurationError(f"this is no certificate: {error}") from error
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        uris = names.get_values_for_type(x509.UniformResourceIdentifier)
    except x509.ExtensionNotFound:
        uris = []
    tasks = tuple(each.removeprefix(TASK_URI) for each in uris if each.startswith(TASK_URI))
    return CertificateFacts(
        tasks, certificate.not_valid_before_utc, certificate.not_valid_after_utc
    )


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey, end: datetime, use: str
) -> x509.CertificateBuilder:
    public = key.public_key()
    usage = x509.KeyUsage(**{each: each == use for each in _USES})
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(public)
        .serial_number(x509.random_serial_number())
        .not_valid_before(_now() - _EARLIER)
        .not_valid_after(end)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)
        .add_extension(usage, critical=True)
    )


def _named(text: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, text)])


def _pem(certificate: x509.Certificate) -> str:
    return certificate.public_bytes(Encoding.PEM).decode()


def _key_pem(key: ec.EllipticCurvePrivateKey) -> str:
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()).decode()


def _now() -> datetime:
    return datetime.now(UTC)

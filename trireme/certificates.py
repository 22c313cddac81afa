"""What a task proves itself with under TLS: its key, its certificate, its authority's certificate.

Each job has an authority of its own, and no other is trusted. A certificate names the tasks that it
is for in its subject alternative names, as URIs such as `trireme:worker:1`, and may name hosts.
`trireme.launch.config.authority` makes both; this module only uses them.
"""

from __future__ import annotations

import contextlib
import os
import ssl
import tempfile
from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import Any

from trireme.errors import ConfigurationError

TASK_URI = "trireme:"
"""The beginning of the URI that names a task in a certificate."""


class Certificates:
    """One task's key and certificate, with the certificate of the job's authority.

    Args:
        pem: the key, the certificate and the authority's certificate, in PEM, in this order.
    """

    def __init__(self, pem: str) -> None:
        self._pem = pem

    def __repr__(self) -> str:
        """Shows nothing: the key is secret."""
        return "Certificates(...)"

    @cached_property
    def client(self) -> ssl.SSLContext:
        """The context of connections that this task opens.

        Raises:
            ConfigurationError: the text does not hold what it should.
        """
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        # Which task answers is checked, by the handshake, and not which host.
        context.check_hostname = False
        return self._loaded(context)

    @cached_property
    def server(self) -> ssl.SSLContext:
        """The context of connections that this task accepts.

        Raises:
            ConfigurationError: the text does not hold what it should.
        """
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.num_tickets = 0  # each connection proves anew who its ends are
        return self._loaded(context)

    def _loaded(self, context: ssl.SSLContext) -> ssl.SSLContext:
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.verify_mode = ssl.CERT_REQUIRED
        context.verify_flags |= ssl.VERIFY_X509_STRICT
        authority = self._pem.rpartition("-----BEGIN CERTIFICATE-----")
        try:
            # The system's authorities are not loaded: the job's own is the only one.
            context.load_verify_locations(cadata=authority[1] + authority[2])
            with _file(authority[0]) as path:
                context.load_cert_chain(path)
        except (ssl.SSLError, ValueError) as error:
            raise ConfigurationError(
                f"a task's certificate cannot be used ({error}): make another with "
                "`trireme certs issue`"
            ) from error
        return context


def names(certificate: Mapping[str, Any]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Returns the tasks and the hosts that a verified certificate names.

    Args:
        certificate: as `ssl.SSLObject.getpeercert` returns it.
    """
    tasks, hosts = [], []
    for kind, name in certificate.get("subjectAltName", ()):
        if kind == "URI" and name.startswith(TASK_URI):
            tasks.append(name.removeprefix(TASK_URI))
        elif kind in ("DNS", "IP Address"):
            hosts.append(name)
    return tuple(tasks), tuple(hosts)


@contextlib.contextmanager
def _file(text: str) -> Iterator[str]:
    """Gives the path of a file that holds a text while the block runs, and has no other name.

    OpenSSL's keys come from files only. Where the system has memory files, nothing reaches a disk.
    """
    if hasattr(os, "memfd_create"):
        with os.fdopen(os.memfd_create("trireme-certificate"), "wb", buffering=0) as file:
            file.write(text.encode())
            yield f"/proc/self/fd/{file.fileno()}"
    else:
        with tempfile.NamedTemporaryFile() as named:  # only this user can read it
            named.write(text.encode())
            named.flush()
            yield named.name

"""What a task proves itself with under TLS; the plug-in `tls` makes, reads and uses it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from trireme.plugins import Plugins


@dataclass(frozen=True, slots=True)
class Certificates:
    """One task's key and certificate, with the certificate of the job's authority.

    Attributes:
        pem: all three in PEM, in this order. It is not shown, as the key is secret.
    """

    pem: str = field(repr=False)


class Authority(Protocol):
    """A job's own certificate authority."""

    def issue(self, task: str) -> str:
        """Returns the PEM of `Certificates` of a task, such as `worker:1`."""


@dataclass(frozen=True, slots=True)
class Encryption:
    """What makes and reads certificates."""

    # makes a new authority, which no task of another job trusts
    make_authority: Callable[[], Authority]
    # reads the PEM of `Certificates` of a task, from its file or a directory of such files
    read: Callable[[Path, str], str]


def encryption() -> Encryption:
    """Returns the installed plug-in."""
    return Plugins("trireme.encryption", "encryption", Encryption).load("tls")

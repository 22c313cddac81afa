"""Certificates of one authority for all tests of a process, as making them takes some time."""

from __future__ import annotations

from functools import cache
from typing import TYPE_CHECKING

from trireme.certificates import Certificates

if TYPE_CHECKING:
    from trireme.tls.authority import JobAuthority


def authority(name: str = "ours") -> JobAuthority:
    """The authority of that name; others do not trust it."""
    return _authority(name)


@cache
def _authority(name: str) -> JobAuthority:
    from trireme.tls.authority import JobAuthority  # tests of the core do without this plug-in

    return JobAuthority.make()


@cache
def certificates(task: str, of: str = "ours") -> Certificates:
    """A task's certificate from the authority of a name."""
    return Certificates(_authority(of).issue(task))

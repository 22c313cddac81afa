"""Certificates of one authority for all tests of a process, as making them takes some time."""

from __future__ import annotations

from functools import cache

from trireme.certificates import Certificates
from trireme.launch.config.authority import Authority


def authority(name: str = "ours") -> Authority:
    """The authority of that name; others do not trust it."""
    return _authority(name)


@cache
def _authority(name: str) -> Authority:
    return Authority.make()


@cache
def certificates(task: str, of: str = "ours") -> Certificates:
    """A task's certificate from the authority of a name."""
    return Certificates(_authority(of).issue(task))

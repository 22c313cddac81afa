"""What the tests with real processes share."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.integration.shell import Shell


@contextmanager
def clean_shell(directory: Path) -> Iterator[Shell]:
    """A shell in a directory; at the end nothing of what it started may be left."""
    shell = Shell(directory)
    (directory / "out").mkdir()
    try:
        yield shell
        shell.assert_nothing_left()
    finally:
        shell.close()


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[Shell]:
    """A shell in an empty directory."""
    with clean_shell(tmp_path) as shell:
        yield shell


@pytest.fixture(scope="module")
def module_shell(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shell]:
    """A shell for all tests of a module."""
    with clean_shell(tmp_path_factory.mktemp("shell")) as shell:
        yield shell

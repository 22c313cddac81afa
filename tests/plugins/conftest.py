"""The package of a kind, installed once a module into an environment of its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.plugins.installed import install


@pytest.fixture(scope="module")
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the package is installed that belongs to a module of tests: `test_KIND.py`."""
    kind = request.module.__name__.rpartition(".test_")[2]
    found = tmp_path_factory.mktemp(kind) / "installed"
    install(kind, found)
    return found

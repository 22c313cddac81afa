"""A package that adds a subcommand."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.plugins.installed import trireme


@pytest.mark.thorough
def test_it_is_listed_explained_and_runs(directory: Path) -> None:
    help = trireme(directory, "--help").stdout
    assert re.search("^  size +print how many bytes a run takes on disk$", help, re.MULTILINE)
    assert re.search("^  run +start a job", help, re.MULTILINE)
    assert "a run directory" in trireme(directory, "size", "--help").stdout
    run = directory.parent / "run"
    (run / "logs").mkdir(parents=True)
    (run / "logs" / "worker-0.log").write_bytes(b"x" * 1234)
    assert trireme(directory, "size", "run").stdout == "       1,234  logs\n"


def test_its_errors_are_those_of_every_command(directory: Path) -> None:
    wrong = trireme(directory, "size", "none", status=2).stderr
    assert wrong == "trireme: error: none is no run directory\n"
    assert "did you mean size?" in trireme(directory, "sizes", status=2).stderr

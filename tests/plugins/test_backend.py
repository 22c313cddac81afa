"""A package that adds a strategy without servers, with the backend that trains by it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.plugins.installed import ROOT, trireme

DIGITS = ROOT / "examples" / "digits.py"


@pytest.mark.thorough
@pytest.mark.processes
def test_a_job_trains_by_it(directory: Path) -> None:
    job = ("run", "--workers", 2, "--strategy", "halved", "--run-dir", "run")
    ended = trireme(directory, *job, DIGITS, "--max-steps", 80)
    (line,) = (each for each in ended.stdout.splitlines() if "| test accuracy" in each)
    assert float(line.rpartition(" ")[2]) > 0.5  # a tenth is chance

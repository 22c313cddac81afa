"""A package that adds a strategy, which a launch names and a job trains by."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.plugins.installed import ROOT, trireme
from trireme.job_config import STRATEGIES

DIGITS = ROOT / "examples" / "digits.py"


@pytest.mark.thorough
@pytest.mark.processes
def test_a_job_trains_by_it(directory: Path) -> None:
    job = ("run", "--ps", 1, "--workers", 2, "--strategy", "lookahead", "--every", 4)
    ended = trireme(directory, *job, "--run-dir", "run", DIGITS, "--max-steps", 80)
    (line,) = (each for each in ended.stdout.splitlines() if "worker:0 | test accuracy" in each)
    assert float(line.rpartition(" ")[2]) > 0.5  # a tenth is chance
    record = json.loads((directory.parent / "run" / "job.json").read_text())
    assert record["options"]["strategy"] == "lookahead"


def test_it_is_listed_and_its_options_are_those_of_the_launch(directory: Path) -> None:
    help = " ".join(trireme(directory, "run", "--help").stdout.split())
    assert ", ".join(sorted({"lookahead", *STRATEGIES})) in help
    wrong = trireme(directory, "run", "--strategy", "lokahead", DIGITS, status=2).stderr
    assert "did you mean lookahead?" in wrong
    job = ("run", "--ps", 1, "--strategy", "sync", "--every", 4, DIGITS)
    wrong = trireme(directory, *job, status=2).stderr
    assert "every is 4 (command line), which sync does not have, only " in wrong

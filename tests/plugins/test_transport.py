"""A package that adds a transport, which passes the conformance suite and carries a job."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.plugins.installed import ROOT, environ, trireme

CONFORMS = """
from tests.conformance import TransportConformance


class TestUnix(TransportConformance):
    address = "unix://127.0.0.1:0"
"""


@pytest.mark.thorough
def test_it_passes_what_every_transport_must(directory: Path) -> None:
    suite = directory.parent / "test_unix.py"
    suite.write_text(CONFORMS)
    ended = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-n", "0", "--rootdir", ROOT, "-c",
         ROOT / "pyproject.toml", suite],
        cwd=ROOT, env=environ(directory), capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stdout + ended.stderr


@pytest.mark.thorough
@pytest.mark.processes
def test_a_job_runs_over_it(directory: Path) -> None:
    demo = (ROOT / "examples" / "digits.py", "--max-steps", 60)
    job = ("run", "--transport", "unix", "--ps", 2, "--workers", 2, "--run-dir", "run")
    ended = trireme(directory, *job, *demo)
    assert "worker:0 | test accuracy" in ended.stdout
    record = json.loads((directory.parent / "run" / "job.json").read_text())
    assert record["coordinator"].startswith("unix://127.0.0.1:")


@pytest.mark.thorough
def test_what_no_job_can_have_is_refused(directory: Path) -> None:
    program = ROOT / "examples" / "digits.py"
    wrong = trireme(directory, "run", "--transport", "unx", program, status=2).stderr
    assert "it must be one of auto, tcp, unix (did you mean unix?)" in wrong
    wrong = trireme(directory, "run", "--transport", "memory", program, status=2).stderr
    assert "it must be one of auto, tcp, unix" in wrong

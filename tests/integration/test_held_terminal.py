"""A launcher whose own output nobody reads."""

from __future__ import annotations

import os
import subprocess
import time
from pathlib import Path

import pytest

from tests.conftest import PYTHONPATH
from tests.integration.shell import TRIREME

LINES = 40_000
FAILS_ONCE = f"""
import os, pathlib, sys, time
again = pathlib.Path("again").exists()
pathlib.Path("again").touch()
for number in range({LINES}):
    print("line", number, "." * 60)
if not again:
    sys.exit("the first time it fails")
pathlib.Path("done").touch()
"""


@pytest.mark.processes
def test_a_job_is_looked_after_and_ends_though_nobody_reads_what_its_launcher_writes(
    tmp_path: Path,
) -> None:
    (tmp_path / "program.py").write_text(FAILS_ONCE)
    reader, writer = os.pipe()
    words = ["run", "--start", "spawn", "--max-restarts", "1", "--run-dir", "run", "program.py"]
    with os.fdopen(reader, "rb"):
        began = time.monotonic()
        ended = subprocess.run(
            [*TRIREME, *words],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": PYTHONPATH},
            stdin=subprocess.DEVNULL,
            stdout=writer,
            stderr=writer,
            timeout=120,
        )
        os.close(writer)
        assert (tmp_path / "done").exists(), f"not after {time.monotonic() - began:.0f} s"
        assert ended.returncode == 0
    log = (tmp_path / "run" / "logs" / "worker-0.log").read_text().splitlines()
    assert sum(line.startswith("line ") for line in log) == 2 * LINES

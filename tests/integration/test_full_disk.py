"""A disk that is full while a job runs: a real one, of four megabytes."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.integration.shell import PROGRAMS, Shell
from trireme.session.checkpoint import latest, list_checkpoints, step_of, verify

pytestmark = [pytest.mark.processes, pytest.mark.timeout(600)]

SOON = 120.0


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of four megabytes."""
    path = tmp_path / "disk"
    path.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=4m", "none", str(path)]
    made = subprocess.run(mount, capture_output=True, text=True)
    if made.returncode:
        pytest.skip(f"NOT TESTED: this user may not mount a small disk: {made.stderr.strip()}")
    yield path
    subprocess.run(["umount", "--lazy", str(path)], check=True)


class Filler:
    """Takes all room of a disk, and what others give back, until it is left."""

    def __init__(self, disk: Path) -> None:
        self._path = disk / "filler"
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Filler:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._over.set()
        self._thread.join()
        self._path.unlink()

    def _run(self) -> None:
        with self._path.open("wb", buffering=0) as file:
            while not self._over.wait(0.001):
                with suppress(OSError):
                    while file.write(bytes(1 << 16)):
                        pass


def finding(shell: Shell, run: Path) -> str:
    """Returns what `trireme status` says of the checkpoint that is not saved."""
    seen = json.loads(shell.run("status", run, "--json").out)
    return next((text for text in seen["findings"] if "NOT SAVED" in text), "")


@pytest.mark.slow
@pytest.mark.thorough
def test_training_goes_on_and_the_alarm_is_loud(shell: Shell, small_disk: Path) -> None:
    run = small_disk / "run"
    running = shell.start(
        *("run", "--ps", 1, "--workers", 2, "--strategy", "sync", "--run-dir", run),
        *(PROGRAMS / "train.py", "--out", shell.directory),
        *("--max-steps", 10**9, "--every-steps", 50, "--pause", 0.003),
    )
    running.until(r"worker:0 \| saved \S+/step-0+50-writer-1\n")
    with Filler(small_disk):
        said = running.until(
            r"warning: the checkpoint of step (\d+) is NOT SAVED: .*No space left on device.*"
            r"the newest is of step \d+\. Training goes on"
        )
        refused = int(said[1])
        running.until(rf"worker:1 \| step \d+ \(global {refused // 10 * 10 + 400}/")
        deadline, alarm, kept = time.monotonic() + SOON, "", -1
        while not alarm.endswith(f"No space left on device; the newest is of step {kept}"):
            assert time.monotonic() < deadline, f"{alarm!r}, and the newest is of step {kept}"
            alarm = finding(shell, run).replace(". Earlier checkpoints are unharmed", "")
            kept = step_of(list_checkpoints(run)[-1])
        assert alarm.startswith("worker:0: the checkpoint of step ")
        for path in list_checkpoints(run):
            verify(path)
    running.until(r"NOT SAVED[\s\S]*worker:0 \| saved \S+/step-\d+-writer-1\n")
    running.send(signal.SIGTERM)
    ended = running.ended()
    assert ended.status == 130
    assert "Traceback" not in ended.text
    saved = [
        int(step) for step in re.findall(r"worker:0 \| saved \S+/step-(\d+)-writer-1\n", ended.out)
    ]
    found = latest(run, lambda path, why: pytest.fail(f"{path}: {why}"))
    assert found is not None
    assert found.step == max(saved) > refused
    assert not [path.name for path in (run / "checkpoints").iterdir() if path.name[0] == "."]
    assert shell.run("report", run).status == 0
    assert "could not write" in (run / "report.html").read_text()

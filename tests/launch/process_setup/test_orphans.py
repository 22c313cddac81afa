"""What a launcher's tasks have started ends with the launcher, even if that is killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import psutil
import pytest

from tests.launch.programs import alive, eventually
from trireme.launch.process_setup.orphans import LAUNCH_VARIABLE, OrphanReaper

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(sys.platform != "linux", reason="it looks through /proc"),
]

LAUNCHER = '''
import os, signal, subprocess, sys
from trireme.launch.process_setup.orphans import OrphanReaper
reaper = OrphanReaper("launch-1")
environ = {**os.environ, "TRIREME_LAUNCH": "launch-1"}
task = """
import subprocess
for own in (False, True):
    child = subprocess.Popen(["sleep", "1000"], start_new_session=own, stdout=subprocess.DEVNULL)
    print(child.pid, flush=True)
"""
subprocess.run([sys.executable, "-c", task], env=environ)
print(subprocess.Popen(["sleep", "1000"], stdout=subprocess.DEVNULL).pid, flush=True)
signal.pause()
'''


def test_when_a_launcher_is_killed_what_its_tasks_have_started_ends() -> None:
    launcher = subprocess.Popen([sys.executable, "-c", LAUNCHER], stdout=subprocess.PIPE, text=True)
    assert launcher.stdout is not None
    child, moved_away, unmarked = (int(launcher.stdout.readline()) for _ in range(3))
    try:
        assert alive(child) and alive(moved_away)
        launcher.kill()
        assert eventually(lambda: not alive(child) and not alive(moved_away))
        assert alive(unmarked), "only what has the mark is the launch's"
    finally:
        os.kill(unmarked, signal.SIGKILL)
        launcher.wait(timeout=10)
        launcher.stdout.close()


def test_a_guard_that_is_sent_away_ends_nothing() -> None:
    reaper = OrphanReaper("launch-2")
    process = psutil.Process(reaper._process.pid)
    task = subprocess.Popen(["sleep", "1000"], env={**os.environ, LAUNCH_VARIABLE: "launch-2"})
    reaper.close()
    try:
        assert not process.is_running()
        assert task.poll() is None
    finally:
        task.kill()
        task.wait()
    reaper.close()

"""A task ends with its launcher, even if that is killed. Real processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from tests.launch.programs import alive, eventually

pytestmark = pytest.mark.processes

CHILD = (
    "import signal; from trireme.launch.process_setup.orphans import end_with_parent; "
    "end_with_parent({parent}); "
)


def test_the_kernel_ends_the_child_of_a_killed_parent() -> None:
    child = CHILD.format(parent="os.getppid()").replace("import signal", "import os, signal")
    parent = (
        "import subprocess, sys; "
        f"subprocess.Popen([sys.executable, '-c', {child!r} + "
        "'print(os.getpid(), flush=True); signal.pause()'], start_new_session=True).wait()"
    )
    launcher = subprocess.Popen([sys.executable, "-c", parent], stdout=subprocess.PIPE, text=True)
    assert launcher.stdout is not None
    pid = int(launcher.stdout.readline())
    assert alive(pid)
    os.kill(launcher.pid, signal.SIGKILL)
    assert eventually(lambda: not alive(pid))
    launcher.stdout.close()
    launcher.wait(timeout=10)


def test_a_child_whose_parent_is_gone_already_ends_at_once() -> None:
    code = CHILD.format(parent=1 if os.getpid() != 1 else 2) + "print('lived on')"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stdout) == (1, "")

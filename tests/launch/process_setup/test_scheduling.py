"""The scheduling policy, in a process of its own: it cannot be taken back for the tests'."""

from __future__ import annotations

import subprocess
import sys

import pytest

PROGRAM = """
import os, threading
from trireme.launch.process_setup.resources import take_turns
os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))  # whatever it has inherited
assert take_turns() and take_turns()
found = []
thread = threading.Thread(target=lambda: found.append(os.sched_getscheduler(0)))
thread.start()
thread.join()
assert found == [os.SCHED_BATCH]
"""


@pytest.mark.skipif(sys.platform != "linux", reason="a policy of Linux")
def test_a_task_and_its_later_threads_interrupt_nobody() -> None:
    subprocess.run([sys.executable, "-c", PROGRAM], timeout=60, check=True)

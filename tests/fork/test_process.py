from __future__ import annotations

import os
import subprocess
import sys
import threading

import pytest

from tests.conftest import PYTHONPATH
from trireme.fork.process import MODULES, reason_not_to_fork


@pytest.mark.thorough
@pytest.mark.processes
def test_of_what_tasks_need_only_the_compiler_of_torch_loads_sympy() -> None:
    """It takes half a second, in each process that a test starts: there the compiler waits."""
    code = f"import sys, {', '.join(MODULES)}; print('sympy' in sys.modules)"
    ended = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"PYTHONPATH": PYTHONPATH},
        capture_output=True,
        text=True,
        check=True,
        timeout=100,
    )
    assert ended.stdout == "False\n"


@pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="no such system forks tasks")
def test_a_process_with_another_thread_does_not_fork() -> None:
    ended = threading.Event()
    threads = [threading.Thread(target=ended.wait, daemon=True) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        refusal = reason_not_to_fork()
    finally:
        ended.set()
        for thread in threads:
            thread.join()
    assert refusal
    count = int(refusal.removeprefix("its process has ").split()[0])
    assert count >= 3

from __future__ import annotations

import os
import threading

import pytest

from trireme.cli.template import reason_not_to_fork


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
    assert refusal is not None
    count = int(refusal.reason.removeprefix("its process has ").split()[0])
    assert count >= 3

"""A main thread stands still while another thread of its process goes on."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.faults.threads import CannotStop, stopped_thread

PROGRAM = """
import select, threading
count, events = 0, select.epoll()
def tell():
    for line in iter(input, "end"):
        print(count, flush=True)
    print("end", flush=True)
threading.Thread(target=tell, daemon=True).start()
while True:
    count += 1
    events.poll(0.001)
"""


def test_a_stopped_thread_stands_still_and_goes_on() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin is not None and process.stdout is not None

        def count() -> int:
            assert process.stdin is not None and process.stdout is not None
            print("?", file=process.stdin, flush=True)
            return int(process.stdout.readline())

        try:
            while not count():
                pass
            with stopped_thread(process.pid):
                first = count()
                for _ in range(50):
                    assert count() == first
            while count() == first:
                pass
        except CannotStop as error:
            pytest.skip(f"NO THREAD IS STOPPED: {error}")
        finally:
            process.kill()

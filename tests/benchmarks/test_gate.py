from __future__ import annotations

import math
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from benchmarks.gate import Gate, rate
from benchmarks.processes import cpu_seconds
from benchmarks.programs import lane as lanes
from benchmarks.programs.lane import Lane


def test_a_rate_is_of_the_time_between_the_first_and_the_last_stamp() -> None:
    assert rate(np.array([10.0, 10.5, 11.0])) == 2.0
    assert rate(np.array([10.0])) == 0.0
    assert rate(np.array([])) == 0.0


class Stepper:
    """A participant in a thread of this process, which steps until it is told to end."""

    def __init__(self, directory: Path) -> None:
        self.lane = Lane(str(directory), "worker-0")
        self.ending = False
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        self.lane.wait()
        while not self.ending:
            time.sleep(0.0005)
            self.lane.step()


def steps(gate: Gate) -> int:
    return gate.lanes()[0].steps


def test_nobody_passes_a_closed_gate_and_an_open_one_lets_through(tmp_path: Path) -> None:
    gate = Gate(tmp_path)
    stepper = Stepper(tmp_path)
    gate.wait_until_ready(1, time.monotonic() + 10)
    assert steps(gate) == 0
    gate.open()
    deadline = time.monotonic() + 10
    while steps(gate) < 20:
        assert time.monotonic() < deadline, f"the stepper made only {steps(gate)} steps"
        time.sleep(0.001)
    gate.close()
    gate.wait_until_ready(1, time.monotonic() + 10)
    made = steps(gate)
    time.sleep(0.05)
    assert steps(gate) == made
    stepper.ending = True
    gate.open()
    stepper.thread.join(10)
    assert not stepper.thread.is_alive()


def test_stamps_are_those_of_a_window_and_oldest_first(tmp_path: Path) -> None:
    gate = Gate(tmp_path)
    gate.open()
    lane = Lane(str(tmp_path), "worker-0")
    times = []
    for _ in range(5):
        lane.step()
        times.append(time.perf_counter())
    stamps = gate.stamps(times[0], times[3])["worker-0"]
    assert len(stamps) == 3  # the second to the fourth step
    assert np.all(np.diff(stamps) > 0)


def test_the_latest_stamps_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lanes, "CAPACITY", 4)
    gate = Gate(tmp_path)
    gate.open()
    lane = Lane(str(tmp_path), "worker-0")
    for _ in range(6):
        lane.step()
    assert len(gate.stamps(0.0, math.inf)["worker-0"]) == 4
    assert steps(gate) == 6


def test_who_does_not_come_is_missed(tmp_path: Path) -> None:
    gate = Gate(tmp_path)
    Lane(str(tmp_path), "worker-0")  # came, and is not ready
    with pytest.raises(TimeoutError, match=r"of 1 participants only \['worker-0'\]"):
        gate.wait_until_ready(1, time.monotonic() + 0.05)


ABANDONED = """
import sys
from benchmarks.gate import Gate
from pathlib import Path
gate = Gate(Path(sys.argv[1]))
print("closed", flush=True)
sys.stdin.read()
"""


@pytest.mark.processes
def test_participants_end_when_whoever_measures_has_died(tmp_path: Path) -> None:
    command = [sys.executable, "-c", ABANDONED, str(tmp_path)]
    measuring = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert measuring.stdout is not None
    assert measuring.stdout.readline() == b"closed\n"
    lane = Lane(str(tmp_path), "worker-0")
    ended: list[SystemExit] = []

    def wait() -> None:
        try:
            lane.wait()
        except SystemExit as error:
            ended.append(error)

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    measuring.kill()
    measuring.communicate()
    thread.join(10)
    assert ended


def test_processor_time_is_counted_and_unknown_for_who_is_gone() -> None:
    import os

    before = cpu_seconds([os.getpid()])
    end = time.process_time() + 0.05
    while time.process_time() < end:
        pass
    assert cpu_seconds([os.getpid()]) - before >= 0.05
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    assert math.isnan(cpu_seconds([ended.pid]))

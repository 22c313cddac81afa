"""The limits hold, and what runs into them says so."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.faults.limits import CannotLimit, fill, memory_group, no_descriptors, small_disk, starve
from trireme.errors import CheckpointError
from trireme.session.checkpoint import CheckpointData, latest, save

MIB = 1 << 20


def test_a_full_disk_keeps_the_old_checkpoint(tmp_path: Path) -> None:
    try:
        with small_disk(tmp_path, 4 * MIB):
            small = CheckpointData(step=1, model={"a": torch.ones(1000)})
            save(tmp_path, small)
            with pytest.raises(CheckpointError, match="No space left"):
                save(tmp_path, CheckpointData(step=2, model={"a": torch.ones(2 * MIB)}))
            filling = fill(tmp_path)
            with pytest.raises(CheckpointError, match="No space left"):
                save(tmp_path, CheckpointData(step=3, model={"a": torch.ones(1000)}))
            data = latest(tmp_path, lambda path, error: pytest.fail(f"{path}: {error}"))
            assert data is not None and data.step == 1
            filling.unlink()
            save(tmp_path, CheckpointData(step=4, model={"a": torch.ones(1000)}))
    except CannotLimit as error:
        pytest.skip(f"NO FULL DISK IS TESTED: {error}")
    assert not list(tmp_path.iterdir())  # nothing of it was on the disk below


OPENS = """
import errno, socket, sys
print("up", flush=True)
for line in sys.stdin:
    made = []
    try:
        for _ in range(2):
            made.append(socket.socket())
        print("2", flush=True)
    except OSError as error:
        print(len(made), errno.errorcode[error.errno], flush=True)
"""


@pytest.mark.processes
def test_no_descriptors_are_left_and_then_there_are_again() -> None:
    # A process of its own: threads of this one may open and close descriptors meanwhile.
    with subprocess.Popen(
        [sys.executable, "-c", OPENS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdin is not None and child.stdout is not None

        def opened() -> str:
            assert child.stdin is not None and child.stdout is not None
            child.stdin.write("\n")
            child.stdin.flush()
            return child.stdout.readline().strip()

        assert child.stdout.readline() == "up\n"
        with no_descriptors(child.pid, spare=1):
            assert opened() == "1 EMFILE"
        assert opened() == "2"
        child.stdin.close()


EATS = "import sys; sys.stdin.readline(); print(len(bytearray(256 << 20)), flush=True)"


@pytest.mark.processes
def test_a_process_that_wants_too_much_memory_is_killed() -> None:
    try:
        with memory_group(64 * MIB) as group:
            eater = subprocess.Popen(
                [sys.executable, "-c", EATS], stdin=subprocess.PIPE, stdout=subprocess.PIPE
            )
            group.add(eater.pid)
            assert group.pids() == [eater.pid]
            out, _ = eater.communicate(b"\n", timeout=60)
            assert (eater.returncode, out) == (-signal.SIGKILL, b"")
    except CannotLimit as error:
        pytest.skip(f"NO MEMORY LIMIT IS TESTED: {error}")


@pytest.mark.processes
def test_a_process_is_killed_for_the_memory_that_another_wants() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as idle:
        try:
            assert starve(idle.pid, 60) == -signal.SIGKILL
        except CannotLimit as error:
            idle.kill()
            pytest.skip(f"NO MEMORY LIMIT IS TESTED: {error}")

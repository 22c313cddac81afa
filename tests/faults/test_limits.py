"""The limits hold, and what runs into them says so."""

from __future__ import annotations

import errno
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.faults.limits import CannotLimit, fill, memory_group, no_descriptors, small_disk
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


def test_no_descriptors_are_left_and_then_there_are_again() -> None:
    with no_descriptors(os.getpid(), spare=1):
        with socket.socket(), pytest.raises(OSError) as error:
            socket.socket()
        assert error.value.errno == errno.EMFILE
    socket.socket().close()


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

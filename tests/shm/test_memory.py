"""Memory without a name: service_limits, seals, and nothing left behind."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from trireme.errors import ConnectionBroken
from trireme.shm.memory import SharedMemory, available

pytestmark = pytest.mark.skipif(not available(), reason="memory of this kind needs Linux")


def test_two_mappings_see_the_same_bytes() -> None:
    mine = SharedMemory.create(10_000)
    theirs = SharedMemory.attach(os.dup(mine.fileno()), 10_000)
    mine.view[5000:5003] = b"abc"
    assert bytes(theirs.view[5000:5003]) == b"abc"
    theirs.view[0:1] = b"z"
    assert bytes(mine.view[0:1]) == b"z"


def test_what_others_write_after_it_has_moved_is_not_in_it() -> None:
    mine = SharedMemory.create(10_000)
    theirs = SharedMemory.attach(os.dup(mine.fileno()), 10_000)
    mine.view[5000:5003], before = b"abc", mine.identity
    held = mine.view[5000:5003]
    mine.move()
    theirs.view[5000:5003] = b"old"
    assert bytes(held) == bytes(mine.view[5000:5003]) == b"abc"
    mine.view[0:1] = b"z"
    assert bytes(theirs.view[0:1]) == b"\0"
    assert mine.place_of(held) == (5000, 3) and mine.identity != before
    new = SharedMemory.attach(os.dup(mine.fileno()), 10_000)
    assert new.identity == mine.identity
    new.view[5000:5003] = b"new"
    assert bytes(held) == b"new"


def test_it_outlives_its_descriptor() -> None:
    memory = SharedMemory.create(100)
    memory.view[0:1] = b"x"
    memory.close()
    memory.close()
    assert bytes(memory.view[0:1]) == b"x"


def test_nobody_can_take_its_pages_away() -> None:
    memory = SharedMemory.create(10_000)
    with pytest.raises(PermissionError):
        os.ftruncate(memory.fileno(), 0)


def test_memory_that_could_shrink_is_refused() -> None:
    descriptor = os.memfd_create("plain", os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, 4096)
    with pytest.raises(ConnectionBroken, match="change its size"):
        SharedMemory.attach(descriptor, 4096)


def test_memory_smaller_than_was_said_is_refused() -> None:
    memory = SharedMemory.create(4096)
    with pytest.raises(ConnectionBroken, match="smaller"):
        SharedMemory.attach(os.dup(memory.fileno()), 1 << 20)


def test_a_file_is_no_such_memory(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"\0" * 4096)
    descriptor = os.open(path, os.O_RDWR)
    with pytest.raises(ConnectionBroken):
        SharedMemory.attach(descriptor, 4096)
    with pytest.raises(OSError):  # and the descriptor is not left open
        fcntl.fcntl(descriptor, fcntl.F_GETFD)


@pytest.mark.parametrize("place", [(0, 5000), (4096, 1), (-1, 2), (10, -1), (1 << 60, 1)])
def test_places_outside_are_refused(place: tuple[int, int]) -> None:
    with pytest.raises(ConnectionBroken, match="names"):
        SharedMemory.create(4096).places([(0, 10), place])


def test_a_view_knows_its_place() -> None:
    memory = SharedMemory.create(4096)
    assert memory.place_of(memory.view[100:250]) == (100, 150)
    with pytest.raises(ValueError, match="does not lie"):
        memory.place_of(memoryview(bytearray(10)))


def test_a_killed_owner_leaves_nothing() -> None:
    """What it maps has no name, so nothing of it can outlive it."""
    program = (
        "import sys, time\n"
        "from trireme.shm.memory import SharedMemory\n"
        "memory = SharedMemory.create(1 << 20)\n"
        "print('made', flush=True)\n"
        "time.sleep(60)\n"
    )
    owner = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE)
    assert owner.stdout is not None
    assert owner.stdout.readline() == b"made\n"
    maps = Path(f"/proc/{owner.pid}/maps").read_text()
    assert "/memfd:trireme (deleted)" in maps
    assert "/dev/shm/" not in maps
    opened = Path(f"/proc/{owner.pid}/fd")
    assert "/memfd:trireme (deleted)" in [os.readlink(each) for each in opened.iterdir()]
    owner.send_signal(signal.SIGKILL)
    owner.wait(10)
    owner.stdout.close()

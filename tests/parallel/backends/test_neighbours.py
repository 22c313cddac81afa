"""Whether a process of this host uses the processor, as others of its process group learn it."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import partial

import msgspec
import pytest

from trireme.host import process_birth
from trireme.parallel.backends.neighbours import Neighbours

COMPUTES = "print(flush=True); sum(range(10**12))"  # one call, which keeps the interpreter lock


def process(pid: int, birth: str) -> bytes:
    return msgspec.msgpack.encode((pid, birth))


def test_what_a_process_of_this_host_uses_grows_while_it_computes() -> None:
    store = dict[str, bytes]()
    neighbours = Neighbours(0, store.__setitem__, store.get)
    assert store == {"process/0": process(os.getpid(), process_birth(os.getpid()))}
    assert neighbours.used(1) is None  # it has not come yet
    with subprocess.Popen([sys.executable, "-c", COMPUTES], stdout=subprocess.PIPE) as child:
        try:
            assert child.stdout is not None and child.stdout.readline()
            store["process/1"] = process(child.pid, process_birth(child.pid))
            used = partial(neighbours.used, 1)
            first = used()
            assert first is not None
            while (now := used()) is not None and now < first + 0.2:
                pass
            assert now is not None
        finally:
            child.kill()
    assert used() is None


@pytest.mark.parametrize("birth", ["", "another boot 17"])
def test_the_same_id_on_another_host_is_another_process(birth: str) -> None:
    store = {"process/1": process(os.getppid(), birth)}
    assert Neighbours(0, store.__setitem__, store.get).used(1) is None


def test_no_process_is_its_own_neighbour_in_another_container() -> None:
    store = {"process/1": process(os.getpid(), process_birth(os.getpid()))}
    assert Neighbours(0, store.__setitem__, store.get).used(1) is None

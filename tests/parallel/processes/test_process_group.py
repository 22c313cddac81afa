from __future__ import annotations

import socket

import pytest
from torch.distributed import HashStore

from trireme.errors import AddressInUse
from trireme.mesh import Mesh
from trireme.parallel.processes.process_group import (
    ProcessGroupConfig,
    TorchProcessGroup,
    _generation_store,
)


def test_who_comes_after_an_orderly_end_finds_nothing_of_those_before() -> None:
    served = HashStore()
    before = _generation_store(served, "job/0/2")
    before.set("here/1", "1")
    # The other rank of the same generation.
    assert _generation_store(served, "job/0/2").check(["here/1"])
    served.add("job/0/2/generation", 1)
    assert not _generation_store(served, "job/0/2").check(["here/1"])
    assert not _generation_store(served, "job/1/2").check(["here/1"])


def test_a_port_that_is_taken_is_named_at_once() -> None:
    with socket.create_server(("127.0.0.1", 0)) as holder:
        address = f"127.0.0.1:{holder.getsockname()[1]}"
        with pytest.raises(AddressInUse, match=rf"cannot listen at {address}.*MASTER_PORT"):
            TorchProcessGroup(ProcessGroupConfig(Mesh(dp=2), address=address))

from __future__ import annotations

import socket

import pytest
from torch.distributed import HashStore

from trireme.cluster.mesh import Mesh
from trireme.errors import AddressInUse
from trireme.parallel.gang import Gang, GangConfig, _of_this_era


def test_who_comes_after_an_orderly_end_finds_nothing_of_those_before() -> None:
    served = HashStore()
    before = _of_this_era(served, "job/0/2")
    before.set("here/1", "1")
    assert _of_this_era(served, "job/0/2").check(["here/1"])  # the other rank of the same era
    served.add("job/0/2/era", 1)
    assert not _of_this_era(served, "job/0/2").check(["here/1"])
    assert not _of_this_era(served, "job/1/2").check(["here/1"])


def test_a_port_that_is_taken_is_named_at_once() -> None:
    with socket.create_server(("127.0.0.1", 0)) as holder:
        address = f"127.0.0.1:{holder.getsockname()[1]}"
        with pytest.raises(AddressInUse, match=rf"cannot listen at {address}.*MASTER_PORT"):
            Gang(GangConfig(Mesh(dp=2), address=address))

"""`trireme scale` stops waiting when another request replaces its own."""

from __future__ import annotations

import pytest

from trireme.cli.scale import check_not_replaced
from trireme.cluster.messages import ClusterStatus, Scaled
from trireme.errors import TriremeError


def test_a_request_that_another_has_replaced_says_so() -> None:
    scaled = Scaled(3, 1, ("ps:2",), ("worker:1",))
    status = ClusterStatus("running", "", 4, (), (), servers=3, workers=1)
    check_not_replaced(scaled, status)
    other = ClusterStatus("running", "", 5, (), (), servers=2, workers=3)
    with pytest.raises(TriremeError) as replaced:
        check_not_replaced(scaled, other)
    assert str(replaced.value) == (
        "another request has replaced this one, for 3 servers and 1 worker: the job shall have 2 "
        "servers and 3 workers now"
    )

"""Bad peers cost good ones little."""

from __future__ import annotations

import pytest

from tests.faults.peers import (
    SCHEMES,
    half_open,
    percentile,
    served,
    strangers,
    waits,
    without_descriptors,
)

BUSY = 5.0  # seconds that this machine may have had something else to do


@pytest.mark.parametrize("way", ["up", "down"])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_connection_that_is_half_open_is_given_up_in_time(scheme: str, way: str) -> None:
    seconds = half_open(scheme, way, 0.5)
    assert 0.3 < seconds < 0.5 + BUSY


@pytest.mark.processes
@pytest.mark.parametrize("scheme", SCHEMES)
def test_strangers_who_come_by_the_hundred_keep_nobody_out(scheme: str) -> None:
    with served(scheme) as service, strangers(service, 150):
        found = waits(service, 20)
    assert percentile(found, 50) < BUSY


@pytest.mark.processes
@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_service_without_descriptors_serves_those_who_are_in_and_rests(scheme: str) -> None:
    answered, used = without_descriptors(scheme, 0.5)
    assert answered > 0
    assert used < 0.5

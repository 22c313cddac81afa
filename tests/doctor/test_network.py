"""What the checks of the network say of what was found."""

from __future__ import annotations

import pytest

from trireme.doctor.network import (
    AddressFacts,
    Reached,
    check_addresses,
    check_port,
    check_reached,
)

INTERFACES = {"lo": ["127.0.0.1"], "eth0": ["10.0.0.5"]}


@pytest.mark.parametrize(
    ("facts", "bad"),
    [
        (AddressFacts("a", ("10.0.0.5",), INTERFACES, "10.0.0.5"), {}),
        (AddressFacts("a", ("127.0.1.1", "127.0.0.1"), INTERFACES, ""), {"network": "warning"}),
        (
            AddressFacts("a", ("127.0.0.1",), INTERFACES, "10.0.0.5"),
            {"host name": "warning"},
        ),
        (AddressFacts("a", (), INTERFACES, "10.0.0.5"), {"host name": "warning"}),
        (AddressFacts("a", ("10.0.0.6",), INTERFACES, "10.0.0.5"), {"host name": "problem"}),
        (
            AddressFacts("a", ("10.0.0.5",), {"eth0": ["10.0.0.5"]}, "10.0.0.5"),
            {"loopback": "problem"},
        ),
    ],
    ids=["well", "alone", "name is loopback", "no name", "another's name", "no loopback"],
)
def test_addresses(facts: AddressFacts, bad: dict[str, str]) -> None:
    checks = check_addresses(facts)
    assert {check.topic: check.level for check in checks if check.level != "ok"} == bad
    assert all(check.advice for check in checks if check.level != "ok")


def test_the_address_that_tasks_announce_is_said() -> None:
    text = [
        check.finding for check in check_addresses(AddressFacts("a", (), INTERFACES, "10.0.0.5"))
    ]
    assert "tasks of `trireme run` announce 127.0.0.1" in text
    assert "tasks that other hosts reach announce 10.0.0.5" in text


def test_ports() -> None:
    assert check_port(0, "").finding == "the system gives ports"
    assert (check_port(80, "").topic, check_port(80, "").level) == ("port 80", "ok")
    assert check_port(80, "taken").level == "problem"


def test_reached() -> None:
    assert check_reached(Reached("ps:0", "a:1", 0.0015)).finding == "reached in 1.5 ms"
    bad = check_reached(Reached("", "a:1", None, "cannot reach a: no answer in time"))
    assert (bad.topic, bad.level) == ("a:1", "problem")

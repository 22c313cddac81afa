"""What the checks of a host say of what was found."""

from __future__ import annotations

from dataclasses import replace

import pytest

from trireme.doctor.check import GIB, MIB, Check
from trireme.doctor.host import (
    CoreFacts,
    Distribution,
    LauncherFacts,
    LimitFacts,
    SharedMemoryFacts,
    check_clock,
    check_cores,
    check_launchers,
    check_limits,
    check_shared_memory,
    check_skew,
    check_versions,
)

INSTALLED = Distribution(
    version="0.1.0",
    python="3.12.4",
    requires_python=">=3.11",
    requirements=(
        "torch<3,>=2.9",
        "prometheus_client>=0.20",
        "ray>=2.40; extra == 'ray'",
    ),
    installed={"torch": "2.9.1+cpu", "prometheus-client": "0.21", "numpy": "2.0"},
)


def levels(checks: list[Check]) -> dict[str, str]:
    return {check.topic: check.level for check in checks}


def test_what_is_installed_as_required_is_well_and_extras_are_not_required() -> None:
    checks = check_versions(INSTALLED, ["numpy==2.0", "not-there==1.0"])
    assert {check.level for check in checks} == {"ok"}
    assert checks[2].finding == "torch 2.9.1+cpu, prometheus_client 0.21"


@pytest.mark.parametrize(
    ("change", "topic", "advice"),
    [
        ({"python": "3.10.1"}, "python", "newer Python"),
        ({"installed": {"torch": "2.9.0"}}, "prometheus_client", "'prometheus_client>=0.20'"),
        (
            {"installed": {"torch": "2.8.0", "prometheus-client": "1"}},
            "torch",
            "pip install 'torch<3,>=2.9'",
        ),
    ],
    ids=["python", "missing", "old"],
)
def test_a_version_that_does_not_fit_is_a_problem(
    change: dict[str, str], topic: str, advice: str
) -> None:
    (bad,) = [check for check in check_versions(replace(INSTALLED, **change)) if check.advice]
    assert (bad.level, bad.topic) == ("problem", topic)
    assert advice in bad.advice


def test_constraints_are_compared_too() -> None:
    (bad,) = [each for each in check_versions(INSTALLED, ["numpy==2.1"]) if each.level != "ok"]
    assert bad.finding == "it is 2.0, and the constraints ask for ==2.1"


def test_a_source_tree_is_only_warned_of() -> None:
    assert levels(check_versions(replace(INSTALLED, version=""))) == {"trireme": "warning"}


def test_shared_memory() -> None:
    assert levels(check_shared_memory(SharedMemoryFacts(8 * GIB, 8 * GIB))) == {
        "memfd": "ok",
        "/dev/shm": "ok",
    }
    small = check_shared_memory(SharedMemoryFacts(64 * MIB, 60 * MIB, "Function not implemented"))
    assert levels(small) == {"memfd": "warning", "/dev/shm": "warning"}
    assert small[1].finding.startswith("60 MiB free of 64 MiB")
    assert levels(check_shared_memory(SharedMemoryFacts(None, None)))["/dev/shm"] == "ok"


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        (LimitFacts(None, None, 100, None), ("ok", "ok", "ok")),
        (LimitFacts(1024, 5000, 100, 64 * MIB), ("ok", "ok", "ok")),
        (LimitFacts(1023, 611, 100, MIB), ("warning", "warning", "warning")),
        (LimitFacts(255, 612, 100, None), ("problem", "ok", "ok")),
    ],
    ids=["none", "usual", "low", "too low"],
)
def test_limits(facts: LimitFacts, expected: tuple[str, ...]) -> None:
    assert tuple(check.level for check in check_limits(facts)) == expected


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        (CoreFacts(4, 0.5, ""), ("ok", "ok")),
        (CoreFacts(4, 4.1, "4"), ("warning", "ok")),
        (CoreFacts(4, 0.0, "5"), ("ok", "warning")),
        (CoreFacts(4, 0.0, "many"), ("ok", "warning")),
        (CoreFacts(4, 0.0, "0"), ("ok", "warning")),
    ],
    ids=str,
)
def test_cores(facts: CoreFacts, expected: tuple[str, ...]) -> None:
    assert tuple(check.level for check in check_cores(facts)) == expected


def test_a_clock_that_stands_or_goes_back_is_a_problem() -> None:
    assert check_clock([1.0, 1.0, 1.1], 1e-9).level == "ok"
    assert check_clock([1.0, 1.0], 1e-9).level == "problem"
    assert check_clock([1.0, 1.2, 1.1], 1e-9).level == "problem"


@pytest.mark.parametrize(
    ("offset", "level"),
    [(-5.0, "ok"), (5.1, "warning"), (-301.0, "problem"), (None, "warning")],
    ids=str,
)
def test_skew(offset: float | None, level: str) -> None:
    assert check_skew("a", offset, "no answer").level == level


def test_what_the_environment_says() -> None:
    assert levels(check_launchers(LauncherFacts("worker:0", "", "", False)))["environment"] == "ok"
    bad = check_launchers(LauncherFacts("", "RANK is not set", "2.40", True))
    assert bad[0].finding == "ray 2.40, srun"
    assert (bad[1].level, bad[1].finding) == ("problem", "RANK is not set")

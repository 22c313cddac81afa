"""What is found is said once, told in the status, and ends the job where it is to."""

from __future__ import annotations

import pytest

from trireme.corruption.findings import Findings, differing
from trireme.corruption.judge import judge
from trireme.errors import CorruptedValues
from trireme.monitor.records import CORRUPTED


def test_what_stays_so_is_said_once_and_again_when_it_was_settled() -> None:
    said: list[str] = []
    findings = Findings(said.append)
    assert findings.status() == {"corruptions": 0}
    for step in (1, 2):
        findings.add(f"shard 1 at {step}", 1)
    findings.add("a push")
    findings.add("a push")
    assert said == ["corrupted values: shard 1 at 1", *["corrupted values: a push"] * 2]
    findings.settled(1)
    findings.add("shard 1 at 9", 1)
    assert findings.status() == {"corruptions": 4, CORRUPTED: "corrupted values: shard 1 at 9"}


def test_what_ends_the_job_is_said_by_its_error() -> None:
    findings = Findings(pytest.fail)
    with pytest.raises(CorruptedValues, match="corrupted values: a push"):
        findings.add("a push", stops=True)
    assert findings.status()["corruptions"] == 1


def test_who_is_wrong_is_said_with_what_differs() -> None:
    copies = {"ps:0": (1, 2, 3, 4), "ps:1": (1, 2, 3, 4), "ps:2": (9, 9, 9, 9)}
    verdict = judge(copies)
    assert verdict is not None
    assert differing(verdict, copies, "shard 1", 20, ["a", "b", "c", "d"]) == (
        "ps:2 has other values of shard 1 than ps:0, ps:1 at step 20, in a, b, c and 1 more"
    )
    del copies["ps:1"]
    verdict = judge(copies)
    assert verdict is not None
    assert differing(verdict, copies, "shard 1", 20, []) == (
        "ps:0 and ps:2 have different values of shard 1 at step 20; nothing says who is right"
    )

"""What the report of a failed job says."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from trireme.launch.exit_reason import describe_status
from trireme.launch.output import Console, TaskOutputs
from trireme.launch.verdict import Failure, Verdict, failure_report

GLOO = (
    b"terminate called after throwing an instance of 'gloo::EnforceNotMet'",
    b"  what():  [enforce fail at pair.cc:456] op.preamble.length <= op.nbytes. 56 vs 18. ",
)


@pytest.mark.parametrize(
    ("lines", "advice"),
    [
        (GLOO, "Each must call the model and backward as often as the others, in an evaluation"),
        ((b"Aborted",), "it crashed in native code"),
    ],
)
def test_a_process_that_gloo_ends_is_told_from_others_that_crash(
    lines: tuple[bytes, ...], advice: str, tmp_path: Path
) -> None:
    """As where processes of `fsdp` call the model different numbers of times."""
    console = Console(io.StringIO(), io.StringIO(), {})
    with TaskOutputs(lambda name: tmp_path / "log", console) as outputs:
        outputs.begin("worker:0")
        for line in lines:
            outputs.show("worker:0", line, True)
        failure = Failure("worker:0", describe_status(-6))
        report = failure_report(
            Verdict(failed=True, failures=[failure]), ["worker:0"], 1.0, outputs
        )
    assert advice in report[-1]

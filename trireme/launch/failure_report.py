"""What a user reads when a job has failed: who failed first, why, who merely waited, what to do."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from trireme.launch.supervision import Failure, Supervision

__all__ = ["failure_report"]


def failure_report(
    supervision: Supervision,
    *,
    seconds: float,
    log: Callable[[str], Path],
    last_lines: Callable[[str], Sequence[str]],
) -> list[str]:
    """Returns the lines of the report.

    Args:
        supervision: of the job that failed.
        seconds: how long the job ran.
        log: the file with a task's output.
        last_lines: the end of a task's output.
    """
    culprit = supervision.culprit
    if culprit is None:
        return [f"the job failed after {seconds:.1f} s"]
    name = culprit.name
    verb = "was" if culprit.outcome.sudden else "failed:"
    first = f"the job failed after {seconds:.1f} s. First {name} {verb} {culprit.outcome.summary}"
    return [
        first,
        *_evidence(culprit, log(name), last_lines(name)),
        *_others(supervision, name),
        *_losses(supervision),
        f"  what to do: {_advice(culprit)}",
    ]


def _evidence(culprit: Failure, log: Path, lines: Sequence[str]) -> list[str]:
    if culprit.outcome.kind == "exception":
        return [f"  its traceback is above and in {log}"]
    if culprit.outcome.kind in ("usage", "error", "victim"):
        return [f"  its output is in {log}"]
    if not lines:
        return [f"  it printed nothing (its output would be in {log})"]
    return [f"  its last lines (all of them in {log}):", *(f"    {line}" for line in lines)]


def _others(supervision: Supervision, culprit: str) -> list[str]:
    own = [
        f"{failure.name} ({failure.outcome.summary})"
        for failure in (*supervision.failures, *supervision.lost)
        if failure.outcome.kind != "victim" and failure.name != culprit
    ]
    failed = {failure.name for failure in supervision.lost} | {
        failure.name for failure in supervision.failures if failure.outcome.kind != "victim"
    }
    waited = [name for name in supervision.names if name not in {*failed, culprit}]
    lines = []
    if own:
        lines.append(f"  failed too: {', '.join(own)}")
    if waited:
        lines.append(f"  only waited or were stopped: {', '.join(waited)}")
    return lines


def _losses(supervision: Supervision) -> list[str]:
    """What is lost with a server, as the workers that have survived it say."""
    said = (f"  {failure.name}: {failure.outcome.loss}" for failure in supervision.failures)
    return [line for line, f in zip(said, supervision.failures, strict=True) if f.outcome.loss]


_AGAIN = "run the same command again: training goes on from the newest checkpoint, if there is one"
_BY_ITSELF = "(--max-restarts N does so by itself)"


def _advice(culprit: Failure) -> str:
    kind, summary = culprit.outcome.kind, culprit.outcome.summary
    if kind == "signal" and "SIGKILL" in summary:
        return (
            "if nobody killed it, memory ran out: use a smaller batch or fewer tasks, then "
            f"{_AGAIN} {_BY_ITSELF}"
        )
    if kind == "hung":
        return (
            "it was stopped, or stuck in a call that did not return (while it is stuck, `py-spy "
            f"dump --pid PID` shows where); {_AGAIN} {_BY_ITSELF}"
        )
    if kind == "signal" and summary.startswith("lost"):
        return f"see whether that node lives (`ray status`), then {_AGAIN}"
    if kind == "signal":
        return f"it crashed in native code, or somebody sent it the signal; {_AGAIN}"
    if kind == "exception":
        return f"correct what the traceback shows, then {_AGAIN}"
    if kind == "usage":
        return "correct what its message above names: the same command would be refused again"
    if kind in ("error", "victim"):
        return f"see its message above; then {_AGAIN}"
    return f"look at its output, then {_AGAIN}"

"""The report on a failed job: which task failed first, why, which only waited, what to do."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from trireme.launch.verdict import Failure, Verdict

__all__ = ["failure_report"]


def failure_report(
    verdict: Verdict,
    names: Sequence[str],
    *,
    seconds: float,
    log: Callable[[str], Path],
    last_lines: Callable[[str], Sequence[str]],
) -> list[str]:
    """Returns the lines of the report.

    Args:
        verdict: how the job failed.
        names: every task that was started.
        seconds: how long the job ran.
        log: returns the file with a task's output.
        last_lines: returns the end of a task's output.
    """
    culprit = verdict.culprit
    if culprit is None:
        return [f"the job failed after {seconds:.1f} s"]
    name = culprit.name
    first = f"the job failed after {seconds:.1f} s. First {culprit}"
    return [
        first,
        *_evidence(culprit, log(name), last_lines(name)),
        *_other_tasks(verdict, names, name),
        *_losses(verdict),
        f"  what to do: {_advice(culprit)}",
    ]


def _evidence(culprit: Failure, log: Path, lines: Sequence[str]) -> list[str]:
    if culprit.reason.kind == "exception":
        return [f"  its traceback is above and in {log}"]
    if culprit.reason.kind in ("usage", "error", "victim"):
        return [f"  its output is in {log}"]
    if not lines:
        return [f"  it printed nothing (its output would be in {log})"]
    return [f"  its last lines (all of them in {log}):", *(f"    {line}" for line in lines)]


def _other_tasks(verdict: Verdict, names: Sequence[str], culprit: str) -> list[str]:
    own = [
        f"{failure.name} ({failure.reason.summary})"
        for failure in (*verdict.failures, *verdict.lost)
        if failure.reason.kind != "victim" and failure.name != culprit
    ]
    failed = {failure.name for failure in verdict.lost} | {
        failure.name for failure in verdict.failures if failure.reason.kind != "victim"
    }
    waited = [name for name in names if name not in {*failed, culprit}]
    lines = []
    if own:
        lines.append(f"  failed too: {', '.join(own)}")
    if waited:
        lines.append(f"  only waited or were stopped: {', '.join(waited)}")
    return lines


def _losses(verdict: Verdict) -> list[str]:
    """Returns what is lost with a server, as its workers report it."""
    return [f"  {each.name}: {each.reason.loss}" for each in verdict.failures if each.reason.loss]


_AGAIN = "run the same command again: training goes on from the newest checkpoint, if there is one"
_BY_ITSELF = "(--max-restarts N does so by itself)"


def _advice(culprit: Failure) -> str:
    kind, summary = culprit.reason.kind, culprit.reason.summary
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

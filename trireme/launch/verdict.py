"""How a job ended: its exit status, which tasks failed and which one first, and what to do."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from trireme.launch.exit_reason import INTERRUPTED, NO_WORKER_JOINED, ExitReason, Kind
from trireme.launch.output import TaskOutputs


@dataclass(frozen=True, slots=True)
class Failure:
    """A task that ended badly, and why."""

    name: str
    reason: ExitReason

    def __str__(self) -> str:
        if self.reason.kind == "silent":
            return f"{self.name} {self.reason.summary}"
        verb = "left:" if self.reason.kind == "left" else "was" if self.reason.sudden else "failed:"
        return f"{self.name} {verb} {self.reason.summary}"


@dataclass(slots=True)
class Verdict:
    """What is known so far of how a job ends."""

    failed: bool = False  # the job as a whole
    interrupted: bool = False  # it was stopped before its end
    failures: list[Failure] = field(default_factory=list)
    """The tasks that failed, by themselves or because of another one, in the order of their end."""
    lost: list[Failure] = field(default_factory=list)
    """The workers that were killed, and the servers that ended, while the others went on."""
    unsaved: list[str] = field(default_factory=list)
    """The workers that were killed before they could save, after a request to stop."""

    @property
    def culprit(self) -> Failure | None:
        """The task that failed first. One that failed by itself comes before any other."""
        victims = [failure for failure in self.failures if failure.reason.kind == "victim"]
        own = [failure for failure in self.failures if failure.reason.kind != "victim"]
        for candidates in (own, self.lost, victims):
            if candidates:
                return min(candidates, key=lambda failure: failure.reason.at)
        return None

    def settle(
        self, workers: Sequence[str], joined: bool | None, *, achieved: bool, saved: bool
    ) -> None:
        """Settles it when the last task has ended; `joined` is None where that is not known."""
        self.failed |= not (achieved or self.interrupted)
        if self.interrupted and joined and not saved and not self.unsaved:
            self.unsaved = [*workers]
        if joined is False and not self.failed and not self.interrupted:
            self.failed = True
            self.failures.append(Failure(workers[0], NO_WORKER_JOINED))

    @property
    def status(self) -> int:
        """The job's exit status: 0 finished, 1 failed, 2 bad usage, 130 stopped and saved."""
        culprit = self.culprit
        if self.failed:
            return 2 if culprit is not None and culprit.reason.kind == "usage" else 1
        if self.unsaved:
            return 1
        return INTERRUPTED if self.interrupted else 0

    @property
    def state(self) -> str:
        """The state of the job that has ended so, as `job.json` has it."""
        if self.failed:
            return "failed"
        return "interrupted" if self.interrupted or self.unsaved else "finished"


def failure_report(
    verdict: Verdict, names: Sequence[str], seconds: float, outputs: TaskOutputs
) -> list[str]:
    """Returns the lines of the report."""
    culprit = verdict.culprit
    if culprit is None:
        return [f"the job failed after {seconds:.1f} s"]
    name = culprit.name
    last = outputs.last_lines(name)
    return [
        f"the job failed after {seconds:.1f} s. First {culprit}",
        *_evidence(culprit, outputs.path(name), last),
        *_other_tasks(verdict, names, name),
        *(f"  {loss}" for loss in losses(verdict.failures)),
        f"  what to do: {_advice(culprit, last)}",
    ]


def losses(failures: Iterable[Failure]) -> list[str]:
    """Returns what the job loses, as the first worker says it that does: it was chief."""
    said = {
        int(each.name.partition(":")[2]): each.reason.loss for each in failures if each.reason.loss
    }
    return [said[min(said)]] if said else []


def _evidence(culprit: Failure, log: Path, lines: Sequence[str]) -> list[str]:
    if culprit.reason.kind == "exception":
        return [f"  its traceback is above and in {log}"]
    if culprit.reason.kind in ("usage", "error", "victim", "corrupted"):
        return [f"  its output is in {log}"]
    if not any(map(str.strip, lines)):
        return [f"  it printed nothing (its output would be in {log})"]
    return [f"  its last lines (all of them in {log}):", *(f"    {line}" for line in lines)]


def _other_tasks(verdict: Verdict, names: Sequence[str], culprit: str) -> list[str]:
    failures = [each for each in verdict.failures if each.reason.kind != "victim"]
    failed = {each.name for each in (*failures, *verdict.lost)} | {culprit}
    own = [
        f"{each.name} ({each.reason.summary})"
        for each in (*failures, *verdict.lost)
        if each.reason.kind != "victim" and each.name != culprit
    ]
    waited = [name for name in names if name not in failed]
    lines = [f"  failed too: {', '.join(own)}"] if own else []
    if waited:
        lines.append(f"  only waited or were stopped: {', '.join(waited)}")
    return lines


_AGAIN = "run the same command again: training goes on from the newest checkpoint, if there is one"
_BY_ITSELF = "(--max-restarts N does so by itself)"

_MISMATCH = "gloo::EnforceNotMet"  # in the last line of a process that gloo ends by an abort

_ADVICE: Mapping[Kind, str] = {
    "usage": "correct the error in its message above: the same command would be refused again",
    "error": f"do what its message above says, then {_AGAIN}",
    "corrupted": f"test that task's host: its memory, or its network; then {_AGAIN}",
    "exception": f"correct what the traceback shows, then {_AGAIN}",
    "hung": f"it was stopped, or stuck in a call that did not return; {_AGAIN} {_BY_ITSELF}",
    "gone": f"see whether that node lives, then {_AGAIN}",
    "signal": f"it crashed in native code, or somebody sent it the signal; {_AGAIN}",
    "left": f"see who sent it the signal, then {_AGAIN}",
    "silent": f"have the program end by itself or by sys.exit, then {_AGAIN}",
}


def _advice(culprit: Failure, last_lines: Sequence[str]) -> str:
    kind, summary = culprit.reason.kind, culprit.reason.summary
    if kind == "signal" and any(_MISMATCH in line for line in last_lines):
        return (
            "the processes that hold the model together have not all done the same in a step, and "
            "gloo ends the first that notices. Each must call the model and backward as often as "
            f"the others, in an evaluation too: correct the program, then {_AGAIN}"
        )
    if kind == "signal" and "SIGKILL" in summary:
        return (
            "if nobody killed it, memory ran out: use a smaller batch or fewer tasks, then "
            f"{_AGAIN} {_BY_ITSELF}"
        )
    return _ADVICE.get(kind, f"see its output above, then {_AGAIN}")

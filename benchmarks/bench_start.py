"""(p) How soon a job begins, and ends: the demo of 200 steps, against the plain script."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from benchmarks.context import Context
from benchmarks.machine import ROOT
from benchmarks.pairs import Interleaved, Plan, Sample, interleave
from benchmarks.processes import environment
from benchmarks.programs.first_step import FIRST_STEP
from benchmarks.results import Goal, Kind, Result

PLAIN, NOW, BEFORE = "plain script", "trireme run", "trireme run, before"

LAUNCHED, IMPORTED, LISTENS, JOINED = (
    "launcher has started a process",
    "process of the server begins",
    "server listens",
    "workers have joined",
)
FIRST, LAST, WHOLE, ENDING = "first step", "last line of a task", "whole", "end after last line"
PHASES = (LAUNCHED, IMPORTED, LISTENS, JOINED, FIRST, LAST, WHOLE, ENDING)

ROUNDS = 7
SECONDS = 600.0
"""How long one run may take."""


@dataclass
class Run:
    """The times of one run, as far as they are known.

    Attributes:
        begun: the time of day at its start.
        after: seconds from the start to each phase that was seen.
    """

    begun: float
    after: dict[str, float] = field(default_factory=dict)

    def saw(self, line: str, launcher: int) -> None:
        """Takes in a line of its output.

        Args:
            line: the line.
            launcher: the process id of what was started.
        """
        now = time.time() - self.begun
        if not line.startswith("trireme:"):
            self.after[LAST] = now
        if line.startswith("ps:0 | listens"):
            self.after[LISTENS] = now
            self._look_at(launcher)
        elif line.startswith("worker:") and "joining the coordinator" in line:
            self.after[JOINED] = now  # of the last one
        elif line.endswith(FIRST_STEP):
            self.after.setdefault(FIRST, now)

    def _look_at(self, launcher: int) -> None:
        """Asks the system when the job's processes were started, to a hundredth of a second."""
        with suppress(psutil.Error):
            for child in psutil.Process(launcher).children():
                words, begun = child.cmdline(), _started(child.pid) - self.begun
                if "--task-index" in words:
                    self.after[LAUNCHED] = min(begun, self.after.get(LAUNCHED, begun))
                    if "ps" in words:
                        self.after[IMPORTED] = begun


def _started(pid: int) -> float:
    """Returns when a process was started, by the clock of `time.time`.

    The system's own time of its start, which psutil adds, is in whole seconds.

    Raises:
        psutil.NoSuchProcess: there is none.
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError as error:
        raise psutil.NoSuchProcess(pid) from error
    age = time.clock_gettime(time.CLOCK_BOOTTIME) - int(fields[19]) / os.sysconf("SC_CLK_TCK")
    return time.time() - age


class Program:
    """A contender that is started anew for each measurement, and runs to its end.

    Args:
        name: its name.
        command: returns the command line, given a directory for the run.
        checkout: whose code it runs.
        scratch: where its run directories go.
    """

    def __init__(
        self, name: str, command: Callable[[Path], list[str]], checkout: Path, scratch: Path
    ) -> None:
        self.name = name
        self._command = command
        self._checkout = checkout
        self._run = scratch / "run"
        self.samples: list[dict[str, Sample]] = []

    def measure(self) -> Sample:
        """Runs it once, and keeps when what happened.

        Raises:
            RuntimeError: it failed.
        """
        shutil.rmtree(self._run, ignore_errors=True)
        run, lines = Run(time.time()), list[str]()
        process = subprocess.Popen(
            self._command(self._run),
            cwd=self._checkout,
            env=environment({"PYTHONPATH": str(self._checkout)}),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        assert process.stdout is not None  # by PIPE
        watch = threading.Timer(SECONDS, process.terminate)
        watch.start()
        for line in process.stdout:
            lines.append(line.rstrip())
            run.saw(lines[-1], process.pid)
        _, status, usage = os.wait4(process.pid, 0)
        watch.cancel()
        process.stdout.close()
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode or FIRST not in run.after:
            raise RuntimeError(f"ended with status {process.returncode}: {' / '.join(lines[-5:])}")
        run.after[WHOLE] = time.time() - run.begun
        run.after[ENDING] = run.after[WHOLE] - run.after[LAST]
        sample = Sample(run.after[WHOLE], 1.0, usage.ru_utime + usage.ru_stime)
        self.samples.append(
            {phase: sample if phase == WHOLE else Sample(at) for phase, at in run.after.items()}
        )
        return sample


def run(context: Context) -> Result:
    """Measures when the phases of the demo's job come, beside the same script by itself."""
    result = Result(
        name="start",
        title="From the command to the first step and to the end: the demo, 200 steps",
        unit="s",
        higher_is_better=False,
        references=(PLAIN, BEFORE),
        work="run",
        goals=[
            Goal("the first step, of the plain script's", FIRST, NOW, PLAIN, at_most=1.1),
            Goal("the whole, of what it was", WHOLE, NOW, BEFORE, at_most=0.75),
        ],
    )
    script = [str(ROOT / "benchmarks" / "programs" / "first_step.py"), "--max-steps", "200"]
    trireme = [sys.executable, "-m", "trireme", "run", "--ps", "1", "--workers", "2"]

    def job(directory: Path) -> list[str]:
        return [*trireme, "--run-dir", str(directory), *script]

    programs = [
        Program(
            PLAIN,
            lambda directory: [sys.executable, *script, "--run-dir", str(directory)],
            ROOT,
            context.scratch / "plain",
        ),
        Program(NOW, job, ROOT, context.scratch / "now"),
    ]
    kinds: dict[str, Kind] = {PLAIN: "limit", NOW: "trireme", BEFORE: "information"}
    if context.against is not None:
        programs.append(Program(BEFORE, job, context.against, context.scratch / "before"))
    else:
        result.skipped.append(f"{BEFORE}: give the checkout of an older commit, --against PATH")
    rounds = 1 if context.quick else ROUNDS
    plan = Plan(2 * rounds, warmup=0 if context.quick else 1, seconds=context.seconds, least=rounds)
    measured = interleave(programs, plan, say=context.say)
    counted = {program.name: program.samples[plan.warmup :] for program in programs}
    for phase in PHASES:
        samples = {
            name: [each[phase] for each in rounds if phase in each]
            for name, rounds in counted.items()
        }
        result.add(
            Interleaved(samples, measured.failed if phase == WHOLE else {}), kinds, condition=phase
        )
    result.notes += [
        "`trireme run --ps 1 --workers 2 examples/digits.py --max-steps 200`, and the same script "
        "by `python`, in turns; seconds from the command on. The first step is that of whichever "
        "worker makes it first.",
        f"{LAUNCHED}: the coordinator. {IMPORTED}: where tasks are forked, the process that they "
        "are forked from has imported PyTorch then; else the import begins.",
        "The processor's time is that of all processes of the job, from start to end.",
    ]
    return result

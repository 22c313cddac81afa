"""A job that this program has started, as the program sees it."""

from __future__ import annotations

import subprocess
import threading
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, Self

import msgspec

from trireme.errors import ConfigurationError, JobFailed, JobStopped, TriremeError, WaitTimeout
from trireme.jobs.function import read_result
from trireme.jobs.messages import Begun, Ended, Line, Progress, Report
from trireme.launch.exit_reason import INTERRUPTED
from trireme.launch.output import Console
from trireme.launch.run_directory import task_log

if TYPE_CHECKING:
    import numpy as np

_STOP = b"s"
_LAST_CHARACTERS = 2000
_REPORT = msgspec.json.Decoder(Report)  # made at import: threads that make one at once crash


@dataclass(frozen=True, slots=True)
class JobStatus:
    """The state of a job.

    Attributes:
        state: `starting`, `running`, `finished`, `failed` or `interrupted`.
        step: the global step.
        max_steps: the global step at which training ends; 0 if unknown.
        loss: the chief's newest loss; None if there is none yet.
        examples_per_second: of all workers together.
        waits_for: the tasks that the job waits for.
        tasks: the state of each task, such as `training`, by its name, until the job is over.
        run_dir: the run directory; None until the job has one.
    """

    state: str
    step: int
    max_steps: int
    loss: float | None
    examples_per_second: float
    waits_for: tuple[str, ...]
    tasks: dict[str, str]
    run_dir: Path | None


class LaunchedJob:
    """A job that this program has started by `trireme.run(..., wait=False)`.

    It ends with this program: when this process ends, however it does, the job is stopped as
    Ctrl-C stops it. As a context manager it stops the job at the end of the block, unless it has
    ended. Any thread may call its methods.
    """

    def __init__(
        self,
        launcher: subprocess.Popen[bytes],  # its standard input takes requests to stop
        reports: IO[bytes],
        errors: IO[bytes],  # what the launcher prints on standard error
        console: Console | None,  # takes the lines of the job; None where they are not shown
        returned: IO[bytes] | None,  # for what the chief returns; None for a program
        id_: str,
    ) -> None:
        self._launcher = launcher
        self._errors = errors
        self._console = console
        self._returned = returned
        self._id = id_
        self._run_dir: Path | None = None
        self._progress = Progress()
        self._ended: Ended | None = None
        self._over = threading.Event()
        self._reader = threading.Thread(
            target=self._read, args=(reports,), name="job-reports", daemon=True
        )
        self._reader.start()

    def __repr__(self) -> str:
        status = self.status()
        return f"<job in {status.run_dir}: {status.state}, global step {status.step}>"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        if not self._over.is_set():
            self.stop()
        self.wait()

    @property
    def run_dir(self) -> Path | None:
        """The run directory, with checkpoints, logs and records; None until the job has one."""
        return self._run_dir

    def status(self) -> JobStatus:
        """Returns the state of the job, half a second old at most."""
        progress = msgspec.structs.asdict(self._progress)
        if self._over.is_set():
            status = 1 if self._ended is None else self._ended.status
            state = {0: "finished", INTERRUPTED: "interrupted"}.get(status, "failed")
        else:
            state = "starting" if self._run_dir is None else "running"
        return JobStatus(state=state, run_dir=self._run_dir, **progress)

    def logs(self, task: str = "worker:0") -> str:
        """Returns what a task, such as `ps:0`, has printed, of all jobs in the run directory."""
        path = None if self._run_dir is None else task_log(self._run_dir, task)
        if path is None or not path.exists():
            there = [] if path is None else sorted(each.stem for each in path.parent.glob("*.log"))
            names = ", ".join(name.replace("-", ":", 1) for name in there) or "none yet"
            raise ConfigurationError(f"no output of a task {task}; there is output of: {names}")
        return path.read_text(encoding="utf-8", errors="replace")

    @property
    def metrics(self) -> dict[str, np.ndarray[Any, np.dtype[np.float64]]]:
        """The history of the chief's status, for plots: arrays of equal length, by name.

        `time` is in seconds since the first record; others are `global_step`, `loss`,
        `examples_per_second` and whatever else the task reports. A value that is not there is NaN.
        A record is made each half second, then more rarely: see docs/monitoring.md.
        """
        import numpy as np

        from trireme.records.records import read_starts

        starts = [] if self._run_dir is None else read_starts(self._run_dir, self._id)
        workers = [start for start in starts if start.begin.task.startswith("worker:")]
        chief = [start for start in workers if start.begin.task == workers[0].begin.task]
        records = [record for start in chief for record in start.records]
        rows = [
            {name: value for name, value in record.status.items() if not isinstance(value, str)}
            | {"time": record.time - records[0].time}
            for record in records
        ]
        names = dict.fromkeys(name for row in [{"time": 0.0}, *rows] for name in row)
        return {name: np.array([row.get(name, np.nan) for row in rows], float) for name in names}

    def stop(self) -> None:
        """Asks the job to stop, and returns at once: the workers save and end, as at Ctrl-C.

        A second call ends all tasks at once; what was not saved is lost.
        """
        pipe = self._launcher.stdin
        assert pipe is not None  # asked for by PIPE
        with suppress(OSError, ValueError):  # the job has ended
            pipe.write(_STOP)
            pipe.flush()

    def wait(self, timeout: float | None = None) -> bool:
        """Waits until the job has ended, at most `timeout` seconds; returns whether it has."""
        return self._over.wait(timeout)

    def result(self, timeout: float | None = None) -> Any:
        """Waits until the job has ended and returns what the chief's function returned.

        That is None for a script or module. After a `timeout`, in seconds, the job goes on.

        Raises:
            JobFailed: a task failed; the message names it, and has its traceback.
            JobStopped: the job was stopped before its end, and has saved.
            WaitTimeout: it has not ended in time.
            ConfigurationError: the job could not start, or the result cannot be read here.
        """
        if not self.wait(timeout):
            raise WaitTimeout(f"the job in {self._run_dir} has not ended within {timeout:g} s")
        error = self.error
        if error is not None:
            raise error
        return None if self._returned is None else read_result(self._returned)

    @property
    def error(self) -> TriremeError | None:
        """Why the job has not finished: the error that `result` raises; None for none."""
        ended = self._ended
        if not self._over.is_set():
            return None
        if ended is None:
            return JobFailed(self._launcher_died())
        if ended.error:
            return (ConfigurationError if ended.usage else JobFailed)(ended.error)
        if ended.status == INTERRUPTED:
            step = self._progress.step
            if not step:
                return JobStopped(f"the job in {self._run_dir} was stopped before its first step")
            return JobStopped(
                f"the job in {self._run_dir} was stopped at global step {step}, and has saved; the "
                "same call goes on from there"
            )
        if not ended.status:
            return None
        report = "\n".join(ended.failure) or "the job was ended before all workers had saved"
        report = report.replace("its traceback is above and in", "its traceback is below and in")
        trace = ended.traceback.rstrip()
        if trace.startswith("  File "):  # the lines alone, as the report has the message
            trace = f"In the program:\n{trace}"
        return JobFailed(f"{report}\n\n{trace}" if trace else report)

    def _launcher_died(self) -> str:
        with suppress(OSError, ValueError):
            self._errors.seek(0)
        printed = self._errors.read().decode(errors="replace").strip()[-_LAST_CHARACTERS:]
        return (
            f"the launcher of the job ended with status {self._launcher.returncode} and has not "
            "said why; its tasks have ended with it"
            + (f". It printed:\n{printed}" if printed else "")
        )

    def _read(self, reports: IO[bytes]) -> None:
        with reports:
            for line in reports:
                with suppress(msgspec.MsgspecError):  # a line that the launcher could not end
                    self._take(_REPORT.decode(line))
        self._launcher.wait()
        self._over.set()

    def _take(self, report: Report) -> None:
        match report:
            case Begun(run_dir):
                self._run_dir = Path(run_dir)
            case Progress():
                self._progress = report
            case Ended():
                self._ended = report
            case Line() if self._console is not None:
                with suppress(Exception):  # the output of this program may be closed
                    if report.task:
                        self._console.line(report.task, report.text, report.error)
                    else:
                        self._console.say(report.text)

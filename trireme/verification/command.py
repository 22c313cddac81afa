"""`trireme verify`, and `trireme.verify` from Python: is a job the same as one process?"""

from __future__ import annotations

import hashlib
import io
import os
import signal
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory, mkdtemp
from typing import Any

import msgspec

from trireme.cli.run import configuration, prepare, start
from trireme.errors import ConfigurationError, TriremeError, UsageError
from trireme.job_config import COMMAND_LINE, LAUNCH_CALL, JobConfig, declared
from trireme.jobs.function import pack_call
from trireme.jobs.run import option_texts
from trireme.launch.config.task_config import TaskConfig, Trial, fresh_job
from trireme.launch.engines import ENGINES
from trireme.launch.environment import check_no_task
from trireme.launch.exit_reason import INTERRUPTED
from trireme.launch.output import Console
from trireme.launch.process_setup.program import MODULE, check_program, program_name
from trireme.launch.process_setup.resources import allow_many_descriptors
from trireme.verification.entry import VERIFY, Options
from trireme.verification.reasons import reason, reason_of_resume
from trireme.verification.record import Run, joined
from trireme.verification.recorder import INITIAL
from trireme.verification.verdict import Verdict, compare, described, exit_status, page

_ORIGIN = "trireme verify"
_SCRATCH = "trireme-verify-"
_ROUNDING = "not counted, as a run from values off in their last places differs so too: "
_REPEATED = 1e-3  # less is rounding, which kernels and Adam make larger, and not a draw
_STRATEGIES: tuple[Mapping[str, Any], ...] = (
    {"strategy": "async", "ps": 1, "workers": 1},
    {"strategy": "sync", "ps": 1},
    {"strategy": "sync", "ps": 2, "replicas": 2},
    {"strategy": "averaging", "ps": 1, "every": 1},
    *({"strategy": each, "ps": 0} for each in ("allreduce", "fsdp", "tensor", "pipeline", "graph")),
    {"strategy": "async", "ps": 1},
)
"""What `--strategies all` compares, with the workers of the launch where there is no number."""


def main(arguments: Sequence[str]) -> int:
    """Runs the command and returns its exit status."""
    parser = VERIFY.parser()
    texts, program = parser.split(arguments)
    given = vars(parser.parse_args(texts))
    own = _options(given, COMMAND_LINE)
    if not program:
        raise UsageError("name the program to verify: trireme verify [OPTIONS] SCRIPT [ARGS...]")
    check_program(program)
    for file in {own.json or "-", own.html or "-"} - {"-"}:  # a run takes long: say so before
        _write(file, "", "a")
    config = configuration(given, given["config"])
    workers = config.tasks.workers if config.tasks.workers != "auto" else 2
    most = {"workers": max(2, workers), "every": None}
    every = [config.replaced(_ORIGIN, **{**most, **values}) for values in _STRATEGIES]
    allow_many_descriptors()
    for each in (signal.SIGTERM, signal.SIGHUP):  # so that runs end, and their files are removed
        signal.signal(each, lambda *_: sys.exit(INTERRUPTED))
    verdicts: list[Verdict] = []
    try:
        with TemporaryDirectory(prefix=_SCRATCH) as scratch:
            verifier = Verifier(program, own, scratch, partial(print, file=sys.stderr))
            for chosen in every if own.strategies else [config]:
                try:
                    verdicts.append(verifier.verify(chosen))
                except TriremeError as error:
                    if not own.strategies:
                        raise
                    verdicts.append(Verdict(name_of(chosen), "refused", str(error)))
                if own.json != "-":
                    print(verdicts[-1], flush=True)
                if own.html:
                    _write(own.html, page(" ".join(program), verdicts))
    except KeyboardInterrupt:
        return INTERRUPTED
    if own.json:
        _write(own.json, msgspec.json.format(msgspec.json.encode(verdicts)).decode() + "\n")
    return exit_status(verdicts)


def verify(
    function_or_script: Callable[..., Any] | str | os.PathLike[str],
    /,
    *,
    args: Sequence[Any] = (),
    steps: int = 20,
    stop_at: int | None = None,
    tolerance: float | None = None,
    **options: Any,
) -> Verdict:
    """Says whether a job is the same as one process, as `trireme verify` does from a shell.

    Printing the verdict says where the runs differ first, and why. Ctrl-C ends them.

    Args:
        function_or_script: opens a `Session`, or calls `distribute`; or the path of such a script.
        args: its arguments.
        steps: how many global steps are compared.
        stop_at: compares a job that is stopped at this step and resumed with one that is not.
        tolerance: how far gradients may be apart, relative to their norm; None derives it.
        options: those of `trireme.run`, such as `workers`, `ps` and `strategy`.

    Raises:
        ConfigurationError: an option is unknown or out of range.
    """
    check_no_task("trireme.verify")
    if threading.current_thread() is not threading.main_thread():
        raise ConfigurationError("trireme.verify starts jobs: call it from the main thread")
    try:
        own = {"steps": steps, "stop_at": stop_at, "tolerance": tolerance}
        limits = _options(own, "verify()")
        config = configuration(option_texts(options), None, LAUNCH_CALL)
    except UsageError as error:
        raise ConfigurationError(str(error)) from None
    inherited: dict[str, int] = {}
    with ExitStack() as held:
        if callable(function_or_script):
            call = held.enter_context(pack_call(function_or_script, args))
            inherited["call"] = call.fileno()
            program = [MODULE, "trireme.jobs.function"]
        else:
            program = [os.fspath(function_or_script), *map(str, args)]
            check_program(program)
        scratch = held.enter_context(TemporaryDirectory(prefix=_SCRATCH))
        return Verifier(program, limits, scratch).verify(config, **inherited)


def _options(given: Mapping[str, Any], origin: str) -> Options:
    own = [each for each in declared(Options) if given.get(each.field) is not None]
    options = Options(**{each.field: each.read(str(given[each.field]), origin) for each in own})
    if options.stop_at is not None and options.stop_at >= options.steps:
        raise UsageError(f"stop-at is {options.stop_at}: it must be below steps, {options.steps}")
    return options


def _write(file: str, text: str, mode: str = "w") -> None:
    try:
        with nullcontext(sys.stdout) if file == "-" else open(file, mode, encoding="utf-8") as to:
            to.write(text)
    except OSError as error:
        raise UsageError(f"{file} cannot be written: {error.strerror}") from error


class _Ended(Exception):
    """A run has ended before its last step: the outcome, and why."""


@dataclass
class Verifier:
    """Compares jobs of one program with one process."""

    program: Sequence[str]  # with its arguments, as after `trireme run`
    limits: Options
    scratch: str  # a directory for what runs record
    say: Callable[[str], object] = str  # told what is done

    def __post_init__(self) -> None:
        self._compare = partial(compare, tolerance=self.limits.tolerance)
        self._references: dict[tuple[object, ...], Run] = {}

    def verify(self, config: JobConfig, **descriptors: int) -> Verdict:
        """Compares a job with one process, or, stopped and resumed, with itself."""
        task = prepare(config).inheriting(**descriptors)
        if not ENGINES.load(config.launch.on).one_host:
            raise UsageError(
                f"trireme verify --on {config.launch.on}: runs are compared on this host alone"
            )
        name, stop_at = name_of(task.config), self.limits.stop_at
        try:
            compare = partial(self._with_itself, stop_at) if stop_at else self._with_one_process
            return compare(name, task)
        except _Ended as ended:
            return Verdict(name, *ended.args)

    def _with_one_process(self, name: str, task: TaskConfig) -> Verdict:
        job = self._run(task, f"{name}, {self.limits.steps} steps as a job", self.limits.steps)
        every = [each for step in job.records.values() for each in step]
        nature = max(each.nature for each in every)
        replicas = 1 if nature else max(each.batches for each in every)
        loops = 1 if any(each.positions for each in every) else replicas
        again = partial(self._reference, task, job, replicas, loops)
        steps = (reference := again()).steps
        joined = f" for each of {loops} loops, with their gradients joined" if loops > 1 else ""
        against, notes = f"one process{joined}", sorted(job.notes() | reference.notes())
        found = self._compare(job.steps, steps)
        if nature:
            return Verdict(name, "apart", nature, replace(found, first=None), against, notes)
        most = max(found.tolerance, _REPEATED)
        before = found.first
        repeated = found.first and compare(again("repeated").steps, steps, tolerance=most).first
        if found.first and (repeated is None or repeated.step > found.first.step):
            grown: list[Mapping[int, Any]] = []  # not in each of them a ReLU switches
            for number in (1, 2, 3):
                grown.append(again(f"perturbed {number}").steps)
                found = self._compare(job.steps, steps, grown=grown)
                if found.first is None:
                    break
        if (first := found.first) is None:
            notes += [_ROUNDING + described(before)] if before else []
            return Verdict(name, "same", "", found, against, notes)
        why = reason(first, job.steps, steps, repeated)
        return Verdict(name, "differs", why, found, against, notes)

    def _with_itself(self, stop_at: int, name: str, task: TaskConfig) -> Verdict:
        steps, against = self.limits.steps, "the job that was not stopped"
        whole = self._run(task, f"{name}, {steps} steps without a stop", steps)
        if (last := max(whole.records)) <= stop_at:
            raise _Ended("refused", f"the program ends at step {last}: --stop-at must be below it")
        run_dir = str(whole.directory / "resumed")
        name = f"{name}, stopped at step {stop_at} and resumed"
        before = self._run(task, f"{name}: until then", stop_at, run_dir)
        after = self._run(task, f"{name}: from then on", steps, run_dir)
        records = {step: each for step, each in before.records.items() if step <= stop_at}
        records |= {step: each for step, each in after.records.items() if step > stop_at}
        found = self._compare(joined(records), whole.steps)
        if (first := found.first) is None:
            return Verdict(name, "same", "", found, against)
        return Verdict(name, "differs", reason_of_resume(first, stop_at), found, against)

    def _reference(
        self, task: TaskConfig, job: Run, replicas: int, loops: int, variant: str = ""
    ) -> Run:
        """Runs the program as one process, or one for each of its loops, from the job's values."""
        if not (initial := job.directory / INITIAL).exists():
            raise _Ended("failed", "no worker was the chief as it began: run it again")
        begin = hashlib.sha256(initial.read_bytes()).hexdigest()
        if (key := (begin, replicas, loops, variant)) not in self._references:
            given = {"strategy": "async", "start": task.config.launch.start}
            config = JobConfig().replaced(_ORIGIN, **given)
            self._references[key] = self._run(
                TaskConfig(job="", workers=loops, config=config, descriptors=task.descriptors),
                f"{self.limits.steps} steps as one process{variant and f', {variant}'}",
                self.limits.steps,
                replicas=replicas,
                joined=replicas // loops,
                settings={"initial": str(initial), "variant": variant},
            )
        return self._references[key]

    def _run(self, task: TaskConfig, what: str, steps: int, run_dir: str = "", **trial: Any) -> Run:
        """Runs the program as a job, as `trireme run` does, to a global step."""
        self.say(what)
        directory = Path(mkdtemp(dir=self.scratch))
        config = task.config.replaced(_ORIGIN, run_dir=run_dir or str(directory / "run"))
        made = Trial(record=str(directory), most_steps=steps, **trial)
        task = msgspec.structs.replace(task, job=fresh_job(), config=config, trial=made)
        out = io.StringIO()
        status = start(task, self.program, program_name(self.program), Console(out, out, {}))
        if status == INTERRUPTED:  # by a signal, which ends all of it
            raise KeyboardInterrupt
        run = Run(directory, out.getvalue().splitlines())
        last = max(run.records, default=0)
        if status == 2 and not last:
            raise _Ended("refused", run.cause())
        if len(run.records) < 2 or (status and last < steps):  # a program may end by itself
            raise _Ended("failed", f"{what}: status {status} after step {last}: {run.cause()}")
        return run


def name_of(config: JobConfig) -> str:
    """Returns the name of a job, such as `sync, ps=1, workers=2`."""
    tasks = config.tasks
    options = {"ps": tasks.ps, "workers": tasks.workers, "mesh": config.model.mesh}
    options |= {"replicas": tasks.replicas if tasks.replicas > 1 else 0}
    words = [f"{name}={value}" for name, value in options.items() if value]
    return ", ".join([config.training.strategy or "no --strategy", *words])

"""`trireme verify`: is a job the same as one process?"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from trireme.cli.run import configuration, prepare
from trireme.errors import TriremeError, UsageError
from trireme.job_config import JobConfig
from trireme.launch.config.task_config import TaskConfig
from trireme.launch.engines import ENGINES
from trireme.launch.process_setup.program import check_program
from trireme.launch.process_setup.resources import allow_many_descriptors
from trireme.strategies import choose
from trireme.verification.entry import VERIFY
from trireme.verification.page import page
from trireme.verification.runs import Runs
from trireme.verification.verdict import Verdict, exit_status
from trireme.verification.verifying import Verifier

_OWN = ("steps", "strategies", "stop_at", "tolerance", "json", "html")
_JOB = "trireme verify"
_STRATEGIES: tuple[Mapping[str, Any], ...] = (
    {"strategy": "async", "ps": 1, "workers": 1},
    {"strategy": "sync", "ps": 1},
    {"strategy": "sync", "ps": 2, "replicas": 2},
    {"strategy": "averaging", "ps": 1, "every": 1},
    {"strategy": "allreduce", "ps": 0},
    {"strategy": "fsdp", "ps": 0},
    {"strategy": "tensor", "ps": 0},
    {"strategy": "pipeline", "ps": 0},
    {"strategy": "graph", "ps": 0},
    {"strategy": "async", "ps": 1},
)
"""What `--strategies all` compares, with the workers of the launch where there is no number."""


class Order(msgspec.Struct):
    """What `trireme.verify` asks of a process of its own."""

    task: TaskConfig
    program: tuple[str, ...]
    name: str
    steps: int
    stop_at: int | None
    tolerance: float | None


def main(arguments: Sequence[str]) -> int:
    """Runs the command and returns its exit status."""
    parser = VERIFY.parser()
    options, program = parser.split(arguments)
    given = vars(parser.parse_args(options))
    own = {name: given.pop(name) for name in _OWN}
    if not program:
        raise UsageError("name the program to verify: trireme verify [OPTIONS] SCRIPT [ARGS...]")
    check_program(program)
    steps = _whole("--steps", own["steps"], least=1)
    stop_at = None if own["stop_at"] is None else _whole("--stop-at", own["stop_at"], least=1)
    if stop_at is not None and stop_at >= steps:
        raise UsageError(f"--stop-at {stop_at}: it must be below --steps, which is {steps}")
    if own["strategies"] not in (None, "all"):
        raise UsageError(
            f"--strategies is {own['strategies']!r}: it must be all; --strategy NAME names one"
        )
    tolerance = _tolerance(own["tolerance"])
    config = configuration(given, given["config"])
    allow_many_descriptors()
    quiet = own["json"] == "-"
    say = partial(print, file=sys.stderr, flush=True)
    with tempfile.TemporaryDirectory(prefix="trireme-verify-") as scratch:
        verifier = Verifier(Runs(program, steps, Path(scratch), os.environ), tolerance, say)
        verdicts = []
        for verdict in _verdicts(verifier, config, stop_at, every=own["strategies"] == "all"):
            verdicts.append(verdict)
            if not quiet:
                print("\n".join(verdict.lines()), flush=True)
    found = json.dumps([each.as_dict() for each in verdicts], indent=2)
    if quiet:
        print(found)
    elif own["json"] is not None:
        _write(own["json"], found + "\n")
    if own["html"] is not None:
        _write(own["html"], page(" ".join(program), verdicts))
    return exit_status(verdicts)


def _verdicts(
    verifier: Verifier, config: JobConfig, stop_at: int | None, *, every: bool
) -> Iterator[Verdict]:
    for chosen in _configs(config) if every else [config]:
        try:
            task = prepare(chosen)
            check_host(task)
        except TriremeError as error:
            if not every:
                raise
            yield Verdict(_named(chosen), "refused", reason=str(error))
            continue
        name = _name(task)
        if stop_at is None:
            yield verifier.verify(name, task)
        else:
            yield verifier.verify_resume(name, task, stop_at)


def check_host(task: TaskConfig) -> None:
    """Raises `UsageError` where tasks run on hosts that do not have the directory of the runs."""
    on = task.config.launch.on
    if not ENGINES.load(on).one_host:
        raise UsageError(f"trireme verify --on {on}: runs are compared on this host alone")


def _configs(config: JobConfig) -> Iterator[JobConfig]:
    workers = config.tasks.workers if config.tasks.workers != "auto" else 2
    for values in _STRATEGIES:
        yield config.replaced(_JOB, **{"workers": max(2, workers), "every": None, **values})


def _name(task: TaskConfig) -> str:
    """Returns the name of a job, such as `sync, 1 server, 2 workers`."""
    named = task.config.training.strategy is not None
    strategy = choose(task.config, workers=task.workers, servers=task.servers).name
    return _named(task.config, strategy if named or task.servers or task.workers > 1 else "alone")


def _named(config: JobConfig, strategy: str | None = None) -> str:
    tasks = config.tasks
    servers, copies = int(tasks.ps), int(tasks.replicas)
    words = [strategy or config.training.strategy or "the program's strategy"]
    if servers:
        words.append(_count(servers, "server") + (f" with {copies} copies" if copies > 1 else ""))
    kind = "worker" if servers else "process"
    words.append("workers by GPUs" if tasks.workers == "auto" else _count(tasks.workers, kind))
    if config.model.mesh:
        words.append(f"mesh {config.model.mesh}")
    return ", ".join(words)


def _count(number: int, what: str) -> str:
    several = f"{what}es" if what.endswith("s") else f"{what}s"
    return f"{number} {what if number == 1 else several}"


def _whole(option: str, text: str, least: int) -> int:
    if not text.isdecimal() or int(text) < least:
        raise UsageError(f"{option} is {text!r}: it must be a whole number from {least}")
    return int(text)


def _tolerance(text: str | None) -> float | None:
    if text is None:
        return None
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < 1:
        raise UsageError(f"--tolerance is {text!r}: it must be a number above 0 and below 1")
    return value


def _write(file: str, text: str) -> None:
    try:
        Path(file).write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{file} cannot be written: {error.strerror}") from error


def answer() -> None:
    """Makes the runs that an order on standard input asks for; prints the verdict as JSON."""
    order = msgspec.json.decode(sys.stdin.buffer.read(), type=Order)
    with tempfile.TemporaryDirectory(prefix="trireme-verify-") as scratch:
        inherited = order.task.descriptors
        runs = Runs(order.program, order.steps, Path(scratch), os.environ, inherited)
        verifier = Verifier(runs, order.tolerance, lambda line: None)
        if order.stop_at is None:
            verdict = verifier.verify(order.name, order.task)
        else:
            verdict = verifier.verify_resume(order.name, order.task, order.stop_at)
    print(json.dumps(verdict.as_dict()))


if __name__ == "__main__":
    answer()

"""`trireme verify`: is a job the same as one process?"""

from __future__ import annotations

import os
import signal
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from trireme.cli.run import configuration, prepare
from trireme.errors import TriremeError, UsageError
from trireme.job_config import JobConfig
from trireme.launch.exit_reason import INTERRUPTED
from trireme.launch.process_setup.program import check_program
from trireme.launch.process_setup.resources import allow_many_descriptors
from trireme.verification.entry import VERIFY
from trireme.verification.page import page
from trireme.verification.runs import Runs
from trireme.verification.verdict import Verdict, exit_status
from trireme.verification.verifying import Verifier, limits_of, name_of

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


def main(arguments: Sequence[str]) -> int:
    """Runs the command and returns its exit status."""
    parser = VERIFY.parser()
    options, program = parser.split(arguments)
    given = vars(parser.parse_args(options))
    own = {name: given.pop(name) for name in _OWN}
    if not program:
        raise UsageError("name the program to verify: trireme verify [OPTIONS] SCRIPT [ARGS...]")
    check_program(program)
    limits = limits_of("--", own["steps"], own["stop_at"], own["tolerance"])
    every = own["strategies"] == "all"
    if own["strategies"] and not every:
        raise UsageError(
            f"--strategies is {own['strategies']!r}: it must be all; --strategy NAME names one"
        )
    files = {name: own[name] for name in ("json", "html") if own[name] not in (None, "-")}
    for file in files.values():  # a run takes long: say so before
        _write(file, "")
    config = configuration(given, given["config"])
    allow_many_descriptors()
    for each in (signal.SIGTERM, signal.SIGHUP):  # so that runs end, and their files are removed
        signal.signal(each, lambda *_: sys.exit(INTERRUPTED))
    quiet = own["json"] == "-"
    verdicts: list[Verdict] = []
    try:
        with runs_of(program, limits.steps) as runs:
            verifier = Verifier(runs, limits, partial(print, file=sys.stderr))
            for chosen in _configs(config) if every else [config]:
                verdicts.append(_verdict(verifier, chosen, every))
                if not quiet:
                    print(verdicts[-1], flush=True)
    except KeyboardInterrupt:
        return INTERRUPTED
    found = msgspec.json.format(msgspec.json.encode(verdicts), indent=2).decode() + "\n"
    if quiet:
        print(found, end="")
    if "json" in files:
        _write(files["json"], found)
    if "html" in files:
        _write(files["html"], page(" ".join(program), verdicts))
    return exit_status(verdicts)


@contextmanager
def runs_of(program: Sequence[str], steps: int) -> Iterator[Runs]:
    """Gives what runs a program, while its files are needed."""
    with tempfile.TemporaryDirectory(prefix="trireme-verify-") as scratch:
        yield Runs(program, steps, Path(scratch), os.environ)


def _verdict(verifier: Verifier, config: JobConfig, every: bool) -> Verdict:
    try:
        return verifier.verify(prepare(config))
    except TriremeError as error:
        if not every:
            raise
        return Verdict(name_of(config), "refused", reason=str(error))


def _configs(config: JobConfig) -> Iterator[JobConfig]:
    workers = config.tasks.workers if config.tasks.workers != "auto" else 2
    for values in _STRATEGIES:
        yield config.replaced(_JOB, **{"workers": max(2, workers), "every": None, **values})


def _write(file: str, text: str) -> None:
    try:
        Path(file).write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{file} cannot be written: {error.strerror}") from error

"""`trireme verify`: is a job the same as one process?"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec

from trireme.cli.run import configuration
from trireme.errors import TriremeError, UsageError
from trireme.job_config import JobConfig
from trireme.launch.exit_reason import INTERRUPTED
from trireme.launch.process_setup.program import check_program
from trireme.launch.process_setup.resources import allow_many_descriptors
from trireme.verification.entry import VERIFY
from trireme.verification.page import page
from trireme.verification.verdict import Verdict, exit_status
from trireme.verification.verifying import Limits, Verifier, limits_of, name_of

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
    steps, every, stop_at, tolerance, json, html = (given.pop(name) for name in _OWN)
    if not program:
        raise UsageError("name the program to verify: trireme verify [OPTIONS] SCRIPT [ARGS...]")
    check_program(program)
    limits = limits_of(steps, stop_at, tolerance)
    if every not in (None, "all"):
        raise UsageError(f"--strategies is {every!r}: it must be all; --strategy NAME names one")
    quiet = json == "-"
    for file in {json, html} - {None, "-"}:  # a run takes long: say so before
        _write(file, "")
    config = configuration(given, given["config"])
    allow_many_descriptors()
    for each in (signal.SIGTERM, signal.SIGHUP):  # so that runs end, and their files are removed
        signal.signal(each, lambda *_: sys.exit(INTERRUPTED))
    verdicts: list[Verdict] = []
    try:
        with verifier_of(program, limits, partial(print, file=sys.stderr)) as verifier:
            for chosen in _configs(config) if every else [config]:
                try:
                    verdicts.append(verifier.verify(chosen))
                except TriremeError as error:
                    if not every:
                        raise
                    verdicts.append(Verdict(name_of(chosen), "refused", reason=str(error)))
                if not quiet:
                    print(verdicts[-1], flush=True)
    except KeyboardInterrupt:
        return INTERRUPTED
    found = msgspec.json.format(msgspec.json.encode(verdicts), indent=2).decode() + "\n"
    if quiet:
        print(found, end="")
    elif json:
        _write(json, found)
    if html:
        _write(html, page(" ".join(program), verdicts))
    return exit_status(verdicts)


def verifier_of(
    program: Sequence[str], limits: Limits, say: Callable[[str], object] = str
) -> Verifier:
    """Returns what verifies jobs of a program in this process's environment."""
    return Verifier(program, limits, os.environ, say)


def _configs(config: JobConfig) -> Iterator[JobConfig]:
    workers = config.tasks.workers if config.tasks.workers != "auto" else 2
    for values in _STRATEGIES:
        yield config.replaced(_JOB, **{"workers": max(2, workers), "every": None, **values})


def _write(file: str, text: str) -> None:
    try:
        Path(file).write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{file} cannot be written: {error.strerror}") from error

"""`trireme verify`, and `trireme.verify` from Python: is a job the same as one process?"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec

from trireme.cli.run import configuration
from trireme.errors import ConfigurationError, TriremeError, UsageError
from trireme.job_config import COMMAND_LINE, LAUNCH_CALL, JobConfig, declared
from trireme.jobs.function import pack_call
from trireme.jobs.run import option_texts
from trireme.launch.environment import check_no_task
from trireme.launch.exit_reason import INTERRUPTED
from trireme.launch.process_setup.program import MODULE, check_program
from trireme.launch.process_setup.resources import allow_many_descriptors
from trireme.verification.entry import VERIFY, Options
from trireme.verification.verdict import Verdict, exit_status, page
from trireme.verification.verifying import Verifier, name_of

_SCRATCH = "trireme-verify-"
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
    for file in filter(None, (own.json, own.html)):  # a run takes long: say so before
        if file != "-":
            _write(file, "")
    config = configuration(given, given["config"])
    allow_many_descriptors()
    for each in (signal.SIGTERM, signal.SIGHUP):  # so that runs end, and their files are removed
        signal.signal(each, lambda *_: sys.exit(INTERRUPTED))
    verdicts: list[Verdict] = []
    try:
        with TemporaryDirectory(prefix=_SCRATCH) as scratch:
            verifier = Verifier(program, own, scratch, partial(print, file=sys.stderr))
            for chosen in _configs(config) if own.strategies else [config]:
                try:
                    verdicts.append(verifier.verify(chosen))
                except TriremeError as error:
                    if not own.strategies:
                        raise
                    verdicts.append(Verdict(name_of(chosen), "refused", str(error)))
                if own.json != "-":
                    print(verdicts[-1], flush=True)
    except KeyboardInterrupt:
        return INTERRUPTED
    found = msgspec.json.format(msgspec.json.encode(verdicts), indent=2).decode() + "\n"
    if own.json == "-":
        print(found, end="")
    elif own.json:
        _write(own.json, found)
    if own.html:
        _write(own.html, page(" ".join(program), verdicts))
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

        def test_training_is_the_same_on_two_workers():
            verdict = trireme.verify(train, workers=2, ps=1, strategy="sync")
            assert verdict.outcome == "same", verdict

    The function travels to the runs by cloudpickle, as for `trireme.run`; Ctrl-C ends them. Call it
    from the main thread. Printing the verdict says where the runs differ first, and why.

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
    own = {"steps": steps, "stop_at": stop_at, "tolerance": tolerance}
    try:
        limits = _options(own, "verify()")
    except UsageError as error:
        raise ConfigurationError(str(error)) from None
    config = configuration(option_texts(options), None, LAUNCH_CALL)
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


def _configs(config: JobConfig) -> Iterator[JobConfig]:
    workers = config.tasks.workers if config.tasks.workers != "auto" else 2
    for values in _STRATEGIES:
        several = {"workers": max(2, workers), "every": None, **values}
        yield config.replaced("trireme verify", **several)


def _write(file: str, text: str) -> None:
    try:
        Path(file).write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{file} cannot be written: {error.strerror}") from error

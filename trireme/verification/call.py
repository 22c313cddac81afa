"""`trireme.verify`: verifies a function of a notebook, or a script, from Python."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec

from trireme.cli.run import configuration, prepare
from trireme.errors import ConfigurationError, TriremeError
from trireme.job_config import LAUNCH_CALL
from trireme.jobs.function import function_name, pack_call
from trireme.jobs.run import option_texts
from trireme.launch.environment import check_no_task
from trireme.launch.process_setup.program import MODULE, check_program
from trireme.verification.command import Order, check_host
from trireme.verification.verdict import Verdict

_CALLS = "trireme.jobs.function"


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

    The runs are processes of their own, to which the function travels by cloudpickle, as for
    `trireme.run`. In a notebook, and in a user's own tests, printing the verdict says where the
    runs differ first, and why.

    Args:
        function_or_script: opens a `Session`, or calls `distribute`; or the path of such a script.
        args: its arguments.
        steps: how many global steps are compared.
        stop_at: compares a job that is stopped at this step and resumed with one that is not.
        tolerance: how far gradients may be apart, relative to their norm; None derives it.
        options: those of `trireme.run`, such as `workers`, `ps` and `strategy`.

    Raises:
        ConfigurationError: an option is unknown or out of range.
        TriremeError: the runs could not be made.
    """
    check_no_task("trireme.verify")
    if steps < 1:
        raise ConfigurationError(f"verify(steps={steps!r}): it must be a whole number from 1")
    if stop_at is not None and not 0 < stop_at < steps:
        raise ConfigurationError(f"verify(stop_at={stop_at!r}): it must be from 1 to steps - 1")
    task = prepare(configuration(option_texts(options), None, LAUNCH_CALL))
    check_host(task)
    with ExitStack() as held:
        if callable(function_or_script):
            name = function_name(function_or_script)
            call = held.enter_context(pack_call(function_or_script, args))
            task = task.inheriting(call=call.fileno())
            program: tuple[str, ...] = (MODULE, _CALLS, f"{name}()")
        else:
            program = (os.fspath(function_or_script), *map(str, args))
            name = Path(program[0]).name
            check_program(program)
        order = Order(task, program, name, steps, stop_at, tolerance)
        made = subprocess.run(
            [sys.executable, "-m", Order.__module__],
            input=msgspec.json.encode(order),
            capture_output=True,
            pass_fds=list(task.descriptors.values()),
            check=False,
        )
    try:
        return Verdict.from_dict(json.loads(made.stdout.splitlines()[-1]))
    except (ValueError, IndexError) as error:
        last = made.stderr.decode("utf-8", "replace").strip().splitlines()[-1:]
        raise TriremeError(f"verify: {''.join(last) or f'status {made.returncode}'}") from error

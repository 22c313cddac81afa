"""`trireme.verify`: verifies a function of a notebook, or a script, from Python."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

from trireme.cli.run import configuration
from trireme.errors import ConfigurationError, UsageError
from trireme.job_config import LAUNCH_CALL
from trireme.jobs.function import pack_call
from trireme.jobs.run import option_texts
from trireme.launch.environment import check_no_task
from trireme.launch.process_setup.program import MODULE, check_program
from trireme.verification.command import verifier_of
from trireme.verification.verdict import Verdict
from trireme.verification.verifying import limits_of


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
    try:
        limits = limits_of(steps, stop_at, tolerance)
    except UsageError as error:
        raise ConfigurationError(f"trireme.verify: {error}") from None
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
        return held.enter_context(verifier_of(program, limits)).verify(config, **inherited)

"""`trireme.run`: starts a job from a program or a notebook."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import IO, Any

import msgspec

from trireme.cli.run import configuration, prepare
from trireme.errors import ConfigurationError, JobStopped, TriremeError, WaitTimeout, suggestion
from trireme.job_config import LAUNCH_CALL
from trireme.jobs.function import function_name, pack_call
from trireme.jobs.job import LaunchedJob
from trireme.jobs.messages import Order
from trireme.launch.config.secret import nameless_file
from trireme.launch.config.task_config import TaskConfig
from trireme.launch.engines import ENGINES, all_options
from trireme.launch.environment import check_no_task
from trireme.launch.output import Console
from trireme.launch.process_setup.program import MODULE, check_program, program_name

_LEAST_WAIT = 10.0
"""The seconds that a job which was stopped for its timeout is given to kill what does not end."""
_STOP_SECONDS = 90.0


def run(
    function_or_script: Callable[..., Any] | str | os.PathLike[str],
    /,
    *,
    args: Sequence[Any] = (),
    ps: int | None = None,
    workers: int | str | None = None,
    strategy: str | None = None,
    mesh: str | None = None,
    replicas: int | None = None,
    run_dir: str | os.PathLike[str] | None = None,
    max_restarts: int | None = None,
    config: str | os.PathLike[str] | None = None,
    wait: bool = True,
    timeout: float | None = None,
    verbose: bool = True,
    **options: Any,
) -> Any:
    """Starts a job from this program or notebook, as `trireme run` does from a shell.

    Every worker calls the function, or runs the script, in a process of its own, which is started
    anew and not forked from this one. The function travels there by cloudpickle, with its arguments
    and all that it refers to; so does what the chief returns. It may be defined in a notebook. It
    opens a `Session`, or calls `distribute`, as a script does.

    Options that are not given come from the environment (`TRIREME_WORKERS`), then from
    `trireme.toml` or `pyproject.toml`, as for `trireme run`.

    Ctrl-C, or an interrupt of the kernel, stops the job while `run` waits: the workers save and
    end, and `KeyboardInterrupt` is raised. A second one ends them at once. The same call goes on
    from the newest checkpoint. A job ends with the process that has started it, saving first.

    Args:
        function_or_script: the function; or the path of a script, or `-m package.module`.
        args: the arguments of the function, or the words after the script.
        ps: how many parameter servers (default 0).
        workers: how many workers, or `auto`: one for each GPU (default 1).
        strategy: the name of a strategy, such as `sync`; its values are options.
        mesh: the processes inside each worker, such as `pp=2`.
        replicas: on how many servers each parameter is.
        run_dir: the directory of checkpoints, records and logs (default `runs/NAME`, with the name
            of the function or script).
        max_restarts: how often a task is started again.
        config: the file of options, in place of `trireme.toml`.
        wait: whether to wait for the end. Otherwise a `LaunchedJob` is returned at once.
        timeout: the seconds after which a job that has not ended is stopped, as by Ctrl-C; None for
            no limit. Only with `wait`.
        verbose: whether to show the job, as `trireme run` does.
        **options: any other option of `trireme run`, with underscores for dashes: `aggregate=4`,
            `compress="int8"`, `tls=True`.

    Returns:
        What the chief's function returned; None for a script or module, or if the function ended
        by `sys.exit`. With `wait=False` a `LaunchedJob`.

    Raises:
        ConfigurationError: an option is unknown or wrong, the script does not exist, or the
            function cannot be pickled.
        JobFailed: a task failed; the message names it, and has its traceback.
        JobStopped: somebody else has stopped the job, such as by `trireme stop`; it has saved.
        WaitTimeout: the job was stopped because of `timeout`.
        KeyboardInterrupt: the job was interrupted; says whether it has saved.
    """
    check_no_task(LAUNCH_CALL)
    _check(function_or_script, args, timeout, wait)
    given: dict[str, Any] = {"ps": ps, "workers": workers, "strategy": strategy, "mesh": mesh}
    given |= {"replicas": replicas, "run_dir": run_dir, "max_restarts": max_restarts, **options}
    file = None if config is None else os.fspath(config)
    task = prepare(configuration(option_texts(given), file, LAUNCH_CALL))
    if callable(function_or_script):
        job = _start_function(function_or_script, args, task, verbose)
    else:
        text = os.fspath(function_or_script)
        words = text.split() if text.startswith(f"{MODULE} ") else [text]
        program = (*words, *map(str, args))
        check_program(program)
        job = _start(Order(task, program, program_name(program)), None, verbose)
    return _wait(job, timeout) if wait else job


def _check(function_or_script: Any, args: Any, timeout: Any, wait: bool) -> None:
    problem = ""
    if not callable(function_or_script) and not isinstance(function_or_script, str | os.PathLike):
        problem = f"run({function_or_script!r}): give a function, or the path of a script"
    elif isinstance(args, str | bytes) or not isinstance(args, Sequence):
        problem = f"run(args={args!r}): give a list or tuple, such as args=({args!r},)"
    elif timeout is not None and not wait:
        problem = (
            "run(timeout=..., wait=False): a job that is not waited for has no timeout; wait "
            "for it by `job.wait(timeout)`, and end it by `job.stop()`"
        )
    elif timeout is not None and (
        isinstance(timeout, bool) or not isinstance(timeout, int | float) or not timeout > 0
    ):
        problem = f"run(timeout={timeout!r}): it must be a number of seconds greater than 0"
    if problem:
        raise ConfigurationError(problem)


def _wait(job: LaunchedJob, timeout: float | None) -> Any:
    """Waits for a job, which Ctrl-C or an interrupt of the kernel stops, and returns its result."""
    interrupts: list[int] = []

    def interrupt(number: int, frame: object) -> None:
        interrupts.append(number)
        job.stop()

    main = threading.current_thread() is threading.main_thread()  # it alone may handle signals
    before = signal.signal(signal.SIGINT, interrupt) if main else None
    try:
        late = not job.wait(timeout)
        if late:
            job.stop()
            if not job.wait(_STOP_SECONDS):
                job.stop()
                job.wait(_LEAST_WAIT)
    except BaseException:  # the caller gets no handle of the job
        job.stop()
        raise
    finally:
        if main:
            signal.signal(signal.SIGINT, before)
    error = job.error
    if interrupts and error is not None:
        raise KeyboardInterrupt(str(error)) from None
    if late and (error is None or isinstance(error, JobStopped)):
        raise WaitTimeout(f"the job in {job.run_dir} has not ended within {timeout:g} s; {error}")
    return job.result(0.1)


def option_texts(given: Mapping[str, Any]) -> dict[str, str | None]:
    """Returns the text of each option, as it would stand on the command line."""
    known = {option.field: option for option in all_options()}
    texts: dict[str, str | None] = {}
    for field, value in given.items():
        if field not in known:
            raise ConfigurationError(
                f"there is no option {field}{suggestion(field, known)}; `trireme run --help` "
                "lists them, here with underscores for dashes"
            )
        if isinstance(value, bool):
            value = "yes" if value else "no"
        elif value is not None and not isinstance(value, str | int | float | os.PathLike):
            raise ConfigurationError(
                f"{field} is {value!r}: give its name, and its values as options beside it, "
                'such as strategy="sync", aggregate=4'
            )
        texts[field] = None if value is None else str(value)
    return texts


def _start_function(
    function: Callable[..., Any], args: Sequence[Any], task: TaskConfig, verbose: bool
) -> LaunchedJob:
    on = task.config.launch.on
    if not ENGINES.load(on).one_host:
        raise ConfigurationError(
            f"on is {on}: a function goes to processes of this host alone; write it "
            "into a script, and run its path"
        )
    name = function_name(function)
    with pack_call(function, args) as call:
        result = nameless_file("result")
        task = task.inheriting(call=call.fileno(), result=result.fileno())
        order = Order(task, (MODULE, "trireme.jobs.function", f"{name}()"), name)
        return _start(order, result, verbose)


def _start(order: Order, result: IO[bytes] | None, verbose: bool) -> LaunchedJob:
    """Starts the launcher of a job in a process of its own.

    It has a session of its own too: signals for the group of this process do not reach it.
    """
    errors = nameless_file("errors")
    reader, writer = os.pipe()
    try:
        launcher = subprocess.Popen(
            [sys.executable, "-m", "trireme.jobs.host", str(writer)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=errors,
            pass_fds=[writer, *order.task.descriptors.values()],
            start_new_session=True,
        )
    except OSError as error:
        os.close(reader)
        raise TriremeError(f"the launcher of the job cannot be started: {error}") from error
    finally:
        os.close(writer)
    assert launcher.stdin is not None  # asked for by PIPE
    with suppress(OSError):  # it has ended: its status says how
        launcher.stdin.write(msgspec.json.encode(order) + b"\n")
        launcher.stdin.flush()
    console = Console(sys.stdout, sys.stderr) if verbose else None
    return LaunchedJob(launcher, os.fdopen(reader, "rb"), errors, console, result, order.task.job)

"""`trireme.spark.launch`: starts a job on the executors of a Spark program."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from trireme.cli.run import configuration, prepare, start
from trireme.errors import ConfigurationError, JobFailed, JobStopped
from trireme.job_config import LAUNCH_CALL
from trireme.jobs.function import function_name, pack_call, read_result
from trireme.jobs.run import option_texts
from trireme.launch.config.secret import nameless_file
from trireme.launch.environment import check_no_task
from trireme.launch.exit_reason import INTERRUPTED
from trireme.launch.output import Console
from trireme.launch.process_setup.program import MODULE
from trireme.launch.process_setup.resources import allow_many_descriptors
from trireme.launch.run_directory import read_record
from trireme.location import RemotePath, local_directory, location
from trireme.spark.rows import Rows, write


def launch(
    function: Callable[..., Any],
    dataset: Any = None,
    /,
    *,
    args: Sequence[Any] = (),
    workers: int = 1,
    ps: int | None = None,
    run_dir: str | os.PathLike[str] | None = None,
    **options: Any,
) -> Any:
    """Starts a job whose tasks run on the executors of this Spark program, and waits for its end.

    Each task of the job is a task of Spark, and has as many cores as `spark.task.cpus` says. Every
    worker calls the function, which opens a `Session` or calls `distribute`. The function travels
    by cloudpickle, as those of Spark do, and so does what the chief returns. Agents on the
    executors call this program back by TLS. Servers start in the first of Spark's tasks.

    A DataFrame is written once, by the executors, into the run directory; the function's first
    argument is then `Rows`, from which the job counts each row once an epoch, under any number of
    workers that come and go. The run directory must be at the same path on all nodes.

    The same call goes on from the newest checkpoint, with the rows that were written then.

    Args:
        function: what every worker calls, as `function(rows, *args)`, or without a data set as
            `function(*args)`.
        dataset: a DataFrame, or `Rows`; None for a function that reads its data itself.
        args: further arguments of the function.
        workers: how many workers.
        ps: how many parameter servers (default 0).
        run_dir: the directory of rows, checkpoints, records and logs (default `runs/NAME`, with the
            name of the function).
        **options: any other option of `trireme run`, with underscores for dashes.

    Returns:
        What the chief's function returned.

    Raises:
        ConfigurationError: an option is unknown or wrong, PySpark is not installed, a column has
            a type that tensors do not have, or the function cannot be pickled.
        JobFailed: a task failed; the message names it, and has its traceback. Or Spark cannot
            bring back what the chief returned.
        JobStopped: the job was stopped, such as by `trireme stop`.
    """
    check_no_task("trireme.spark.launch")
    if threading.current_thread() is not threading.main_thread():
        raise ConfigurationError("trireme.spark.launch handles signals: call it in the main thread")
    if not callable(function):
        raise ConfigurationError(f"launch({function!r}): give a function; a script has --on spark")
    name = function_name(function)
    where = os.fspath(Path("runs", name) if run_dir is None else run_dir)
    directory = where if isinstance(location(where), RemotePath) else os.path.abspath(where)
    given = {"workers": workers, "ps": ps, "run_dir": directory, "on": "spark", **options}
    task = prepare(configuration(option_texts(given), None, LAUNCH_CALL))
    console = Console(sys.stdout, sys.stderr)
    if dataset is not None and not isinstance(dataset, Rows):
        if directory == where and not os.path.isabs(where):
            raise ConfigurationError(
                f"run_dir is {where}: workers map the rows of a DataFrame, which takes a directory "
                "on a file system that all nodes share"
            )
        dataset = write(dataset, Path(directory, "rows"), console.say)
    args = args if dataset is None else (dataset, *args)
    allow_many_descriptors()
    program = (MODULE, "trireme.jobs.function", f"{name}()")
    with pack_call(function, args) as call, nameless_file("result") as result:
        task = task.inheriting(call=call.fileno(), result=result.fileno())
        status = start(task, program, name, console)
        if status == INTERRUPTED:
            raise JobStopped(
                f"the job in {directory} was stopped; the same call goes on from its newest "
                "checkpoint"
            )
        if status:
            record = read_record(local_directory(directory))
            raise JobFailed("\n".join([*record.failure, "", record.traceback]).strip())
        return read_result(result)

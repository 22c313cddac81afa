"""`trireme graph SCRIPT`: draws the graph of a program's model, placed on workers."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from trireme.errors import UsageError
from trireme.graph.entry import GRAPH, GRAPH_OPTIONS
from trireme.job_config import JobConfig
from trireme.launch.config.sources import read_config, read_file
from trireme.launch.config.task_config import (
    DRAWN,
    TASK_VARIABLE,
    GroupMember,
    TaskConfig,
    encode_task,
    fresh_job,
)
from trireme.launch.process_setup.program import MODULE, check_program, run_program
from trireme.launch.process_setup.resources import thread_variables, threads_of_task


def main(arguments: Sequence[str]) -> int:
    """Runs the program until its session has drawn the model's graph, and returns its status."""
    parser = GRAPH.parser()
    options, program = parser.split(arguments)
    given = parser.parse_args(options)
    config = read_config(vars(given), os.environ, read_file(given.config), GRAPH_OPTIONS)
    config = config.replaced("trireme graph", strategy="graph")
    if not program:
        raise UsageError("name the program: trireme graph [OPTIONS] SCRIPT [ARGS...]")
    check_program(program)
    task = _task(config)
    os.environ.update(thread_variables(os.environ, task.threads or 1))
    os.environ[TASK_VARIABLE] = encode_task(task)
    status = run_program(program)
    if status == DRAWN:
        return 0
    if status == 0:
        what = " ".join(program[: 2 if program[0] == MODULE else 1])
        print(
            f"error: {what} has ended, and no session in it has made a step, at "
            "which its graph is drawn: give the program the options with which it trains, or draw "
            "another program",
            file=sys.stderr,
        )
        return 1
    return status


def _task(config: JobConfig) -> TaskConfig:
    if config.tasks.workers == "auto":
        raise UsageError(
            f"workers is auto ({config.origin('workers')}), and a graph is placed on a number of "
            "workers: give --workers N"
        )
    processes = config.tasks.workers * config.inside
    return TaskConfig(
        job=fresh_job(),
        workers=processes,
        group=GroupMember(size=processes),
        config=config,
        display="none",
        dry_run=True,
        draw=processes,
        threads=threads_of_task(os.environ, processes),  # as each task would have
    )

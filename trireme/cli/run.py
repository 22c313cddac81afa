"""`trireme run`: a job on this host, or on a Ray cluster."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import msgspec

from trireme.cli.live import JobWatch
from trireme.cli.options import read_settings
from trireme.cli.parser import COMMANDS, NOT_BUILT_OPTIONS
from trireme.cluster.mesh import Mesh
from trireme.errors import UsageError
from trireme.launch.console import Console
from trireme.launch.detect import TASK_VARIABLE, TaskConfig, encode_task, fresh_job
from trireme.launch.gpus import visible_gpus
from trireme.launch.launcher import Job
from trireme.launch.local import run_local
from trireme.launch.run_directory import RunDirectory, claim, claim_free, read_record
from trireme.launch.script import check_script, run_script
from trireme.launch.secret import fresh_secret, read_secret
from trireme.launch.settings import OPTIONS, Settings, check_engine, check_mesh, check_together
from trireme.launch.supervision import Limits
from trireme.launch.threads import thread_variables
from trireme.monitor.records import records_directory

__all__ = ["main"]

CONNECT_TIMEOUT = 30.0
"""The coordinator listens before any other task is started: where it is not found, it is gone."""


def main(arguments: Sequence[str]) -> int:
    """Runs the command and returns the job's exit status.

    Raises:
        UsageError: an option is unknown, wrong, or not built yet; or there is no such program.
    """
    parser = COMMANDS["run"][0]()
    options, program = parser.split(arguments)
    given = parser.parse_args(options)
    _refuse_unbuilt(given)
    settings = read_settings(given, os.environ, OPTIONS)
    check_engine(settings)
    if given.allow_plaintext and settings["on"] == "local":
        raise UsageError("--allow-plaintext is for jobs on several hosts: add --on ray")
    settings = _sized(settings)
    if not program:
        raise UsageError("name the program to run: trireme run [OPTIONS] SCRIPT [ARGS...]")
    script = check_script(program[0])
    task = _task(settings, given.allow_plaintext)
    if given.dry_run:
        return _dry_run(settings, task, script, program[1:])
    return _start(settings, task, script, program)


def _refuse_unbuilt(given: argparse.Namespace) -> None:
    for name in NOT_BUILT_OPTIONS:
        if getattr(given, name) is not None:
            raise UsageError(f"--{name} is not built yet")


def _sized(settings: Settings) -> Settings:
    """Fills in what follows from the size of the job and this host, and checks it."""
    if settings["workers"] == "auto":
        gpus = visible_gpus()
        workers = max(1, gpus // Mesh.parse(settings["mesh"]).size)
        found = f"{gpus} GPUs here" if gpus != 1 else "1 GPU here"
        settings = settings.replaced(
            "workers", workers, f"{settings.origins['workers']}: auto, {found}"
        )
    check_together(settings, settings["workers"], settings["ps"])
    check_mesh(settings)
    return settings


def _task(settings: Settings, allow_plaintext: bool) -> TaskConfig:
    inside, servers = Mesh.parse(settings["mesh"]).size, settings["ps"]
    processes = inside if servers else inside * settings["workers"]
    return TaskConfig(
        job=fresh_job(),
        # Without servers every process is a worker.
        workers=settings["workers"] if servers else processes,
        processes=processes,
        mesh=settings["mesh"],
        schedule=settings["schedule"],
        microbatches=settings["microbatches"],
        every=settings["every"],
        servers=servers,
        run_dir=settings["run-dir"],
        strategy=settings["strategy"],
        aggregate=settings["aggregate"],
        staleness=settings["staleness"],
        host_aggregator=settings["host-aggregator"],
        prefetch=settings["prefetch"],
        transport=settings["transport"],
        compress=settings["compress"],
        overlap=settings["overlap"],
        profile=settings["profile"],
        metrics_port=settings["metrics-port"],
        metrics_host=settings["metrics-host"],
        display="plain",
        join_timeout=settings["join-timeout"],
        progress_timeout=settings["progress-timeout"],
        connect_timeout=min(settings["join-timeout"], CONNECT_TIMEOUT),
        allow_plaintext=allow_plaintext,
        origins=settings.origins,
    )


def _dry_run(settings: Settings, task: TaskConfig, script: Path, arguments: Sequence[str]) -> int:
    """Prints the settings, then lets the program's session say the rest and end."""
    for line in settings.lines():
        print(line)
    sys.stdout.flush()
    threads, variables = thread_variables(os.environ, task.tasks)
    dry = msgspec.structs.replace(task, dry_run=True, threads=threads)
    os.environ.update(variables | {TASK_VARIABLE: encode_task(dry)})
    return run_script(script, arguments)


def _start(settings: Settings, task: TaskConfig, script: Path, program: Sequence[str]) -> int:
    run = _engine(settings)
    console = Console(sys.stdout, sys.stderr, os.environ)
    directory = _claim(settings["run-dir"], script)
    try:
        directory.write_secret(fresh_secret())
        secret = read_secret(directory.secret_file)
        watched = console.live and task.servers > 0
        if watched:  # steps are shown in one line for all, not in each worker's own
            task = msgspec.structs.replace(task, display="events")
        if settings["on"] == "local":  # elsewhere the directory may not be there
            records = records_directory(directory.path.resolve())
            task = msgspec.structs.replace(task, records=str(records))
        job = Job(
            program=tuple(program),
            task=msgspec.structs.replace(task, secret=secret),
            limits=Limits(restarts=settings["max-restarts"], together=task.processes > 1),
            options=settings.values,
        )
        if not watched:
            return run(job, directory, console)
        watch = JobWatch(
            lambda: _coordinator(directory), task.job, bytes.fromhex(secret), console.status
        )
        watch.start()
        try:
            return run(job, directory, console)
        finally:
            watch.close()
    finally:
        directory.release()


def _engine(settings: Settings) -> Callable[[Job, RunDirectory, Console], int]:
    """Returns what runs a job where the settings say."""
    if settings["on"] == "local":
        return run_local
    from trireme import __version__
    from trireme.launch.placement import Wishes
    from trireme.launch.ray import run_ray
    from trireme.launch.ray_cluster import load_ray

    inside, servers = Mesh.parse(settings["mesh"]).size, settings["ps"]
    load_ray()  # where it is missing, before anything is written
    return partial(
        run_ray,
        address=settings["ray-address"],
        wishes=Wishes(
            servers=servers,
            # Without servers every process is a worker.
            workers=settings["workers"] * (1 if servers else inside),
            processes=inside if servers else 1,
            cpus=settings["ray-cpus-per-worker"],
            gpus=settings["ray-gpus-per-worker"],
            pack=settings["ray-pack-workers"],
        ),
        version=__version__,
    )


def _coordinator(directory: RunDirectory) -> str:
    """Returns where the job's coordinator listens; "" while that is not known."""
    try:
        return read_record(directory.path).coordinator
    except UsageError:
        return ""


def _claim(run_dir: str | None, script: Path) -> RunDirectory:
    if run_dir is not None:
        return claim(Path(run_dir))
    return claim_free(Path("runs") / script.stem)

"""Starts the agents of a job's tasks as tasks of Spark, each in a job of Spark's of its own.

A barrier stage would start all its tasks again where one is lost, and so lose what servers hold.
"""

from __future__ import annotations

import os
import socket
import time
import uuid
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from trireme.agents.agent import NodeFacts, TaskAgent
from trireme.agents.engine import run_on_agents
from trireme.agents.pool import first_line
from trireme.agents.resources import wanted
from trireme.errors import ConfigurationError, JobFailed
from trireme.jobs.function import by_worker
from trireme.launch.engines import engine_options
from trireme.launch.launcher import Job
from trireme.launch.output import Console
from trireme.launch.run_directory import RunDirectory
from trireme.spark.agent import Station, run_agent
from trireme.spark.options import SparkOptions
from trireme.spark.server import AgentConnection, AgentServer

_END_SECONDS = 30.0  # that Spark has to end the tasks of agents


def session(master: str | None) -> Any:
    """Returns this program's session of Spark, or a new one."""
    try:
        from pyspark.sql import SparkSession
    except ImportError as error:
        raise ConfigurationError(
            f"--on spark needs PySpark, and it cannot be imported ({error}): pip install "
            "'trireme-train[spark]', here and in the Python of the executors"
        ) from error
    active = SparkSession.getActiveSession()
    if active is not None and master in (None, active.sparkContext.master):
        return active
    if active is not None:
        raise ConfigurationError(
            f"--spark-master {master}: this program has a session with "
            f"{active.sparkContext.master} already: leave the option out, or stop that session"
        )
    builder = SparkSession.builder.appName("trireme")
    try:
        return (builder if master is None else builder.master(master)).getOrCreate()
    except Exception as error:  # Java's come as Py4JJavaError, and others
        raise ConfigurationError(
            f"no Spark cluster is joined{(master and f' at --spark-master {master}') or ''}: "
            f"{first_line(error)}"
        ) from error


@dataclass(frozen=True, slots=True)
class _Reserved:
    """What each of Spark's tasks has, as its configuration says."""

    cpus_per_worker: int
    gpus_per_worker: float
    pack_workers: bool = False


class SparkPool:
    """The executors of a Spark cluster. The coordinator is in the launcher's process."""

    place = "the Spark cluster"
    more_room = "give it more executors or cores (spark.executor.instances, spark.cores.max)"
    needs = "trireme-train[spark] in the Python that Spark runs there (PYSPARK_PYTHON)"

    def __init__(self, context: Any, job: Job) -> None:
        self._context = context
        self._job = job
        conf = context.getConf()
        gpus = float(conf.get("spark.task.resource.gpu.amount", "0"))
        self.options = _Reserved(int(conf.get("spark.task.cpus", "1")), gpus)
        self._host = conf.get("spark.driver.host", socket.gethostname())
        bound = conf.get("spark.driver.bindAddress", self._host)
        self._server = AgentServer(bound)
        self._id = uuid.uuid4().hex
        self._call = _content(job.task.descriptors.get("call"))
        # Each with the thread that waits for its task of Spark.
        self._waiting: list[tuple[AgentConnection, Any]] = []
        self._returned: list[bytes] = []
        self._problems: dict[str, str] = {}  # of tasks of Spark, by the names of ours

    def close(self) -> None:
        """Ends the agents, and stores what the chief's function has returned."""
        for connection, _ in self._waiting:
            connection.end()
        self._join()
        with suppress(Exception):  # whatever Py4J raises where Spark itself has ended
            self._context.cancelJobGroup(self._id)  # tasks that wait for room
        self._join()
        self._server.close()
        result = self._job.task.descriptors.get("result")
        if self._returned and result is not None:
            os.pwrite(result, min(self._returned, key=by_worker), 0)

    def _join(self) -> None:
        deadline = time.monotonic() + _END_SECONDS
        for _, thread in self._waiting:
            thread.join(max(0.0, deadline - time.monotonic()))

    def check_result(self) -> None:
        """Raises an error if Spark has lost what the function has returned."""
        lost = [each for each in self._problems.items() if each[0].startswith("worker:")]
        if lost and not self._returned and "result" in self._job.task.descriptors:
            raise JobFailed(
                f"the job has finished, and what {lost[0][0]} returned is lost: {lost[0][1]}. "
                "Return less, and save the rest in the run directory"
            )

    def start_agents(self, names: Sequence[str]) -> Mapping[str, AgentConnection]:
        return {name: self._start_agent(name) for name in names}

    def _start_agent(self, name: str) -> AgentConnection:
        from pyspark import InheritableThread

        number, certificate, connection = self._server.open(name)
        call = self._call if name.startswith("worker:") else None
        where = (self._host, self._server.port, certificate)
        station = Station(name, number, *where, tuple(self._job.program), os.getcwd(), call)

        def run() -> None:
            why = "Spark has ended it"
            try:
                context = self._context
                context.setJobGroup(self._id, f"trireme {name}", interruptOnCancel=True)
                stations = context.parallelize([station], 1)
                self._returned += filter(by_worker, stations.flatMap(run_agent).collect())
            except Exception as error:  # of Java, of the connection with it, or of the agent
                why = self._problems[name] = _reason(error)
            connection.lose(why)

        thread = InheritableThread(target=run, daemon=True)
        self._waiting.append((connection, thread))
        thread.start()
        return connection

    def inspect_here(self) -> NodeFacts:
        here = TaskAgent("launcher", self._job.program, os.getcwd())
        return here.inspect(socket.gethostname(), self._host)

    def release(self, name: str) -> None:
        """Does nothing: Spark tracks which cores are free."""

    def shortage(self, names: Iterable[str]) -> str:
        has = self._context.defaultParallelism
        return f"{wanted(names, self.options)}; its executors have {has} in all"


def _reason(error: Exception) -> str:
    """Returns why Spark has ended a task, as Java says it where that is known."""
    java = getattr(error, "java_exception", None)
    return first_line(error if java is None else RuntimeError(java.getMessage()))


def _content(fd: int | None) -> bytes | None:
    if fd is None:
        return None
    with os.fdopen(os.dup(fd), "rb") as file:
        file.seek(0)
        return file.read()


def run_spark(job: Job, directory: RunDirectory, console: Console) -> int:
    """Runs a job to its end and returns its exit status, as `run_local` does."""
    options = engine_options(job.task.config, SparkOptions)
    pool = SparkPool(session(options.master).sparkContext, job)
    try:
        status = run_on_agents(job, directory, console, pool)
    finally:
        pool.close()
    if status == 0:
        pool.check_result()
    return status

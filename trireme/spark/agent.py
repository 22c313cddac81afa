"""The agent of one task inside a task of Spark, on an executor; it calls the launcher by TLS."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from typing import IO

import msgspec

from trireme.agents.agent import NodeFacts, TaskAgent
from trireme.agents.calls import AT_A_TIME, answer
from trireme.certificates import Certificates
from trireme.launch.config.secret import nameless_file
from trireme.launch.config.task_config import TaskConfig
from trireme.tls.transport import ssl_context

CONNECT_SECONDS = 30.0
LINE_BYTES = 1 << 26
"""The largest request or answer, in bytes: a report has all that a task printed since the last."""


@dataclass(frozen=True, slots=True)
class Station:
    """What an agent needs to reach its launcher. It goes to one executor, within Spark's task."""

    name: str  # of the task
    number: int  # of the agent: Spark starts a task that has failed again, and one of them counts
    host: str  # of the launcher
    port: int
    certificate: str = field(repr=False)  # in PEM
    program: tuple[str, ...]
    directory: str
    call: bytes | None = field(
        repr=False
    )  # the function that a worker calls, as `pack_call` has it


class SparkAgent(TaskAgent):
    """A `TaskAgent` in a task of Spark. It has the worker's function, and what that returns."""

    def __init__(self, station: Station) -> None:
        super().__init__(station.name, station.program, station.directory)
        self.address = ""
        self._held: dict[str, IO[bytes]] = {}
        if station.call is not None:
            self._held = {name: nameless_file(name) for name in ("call", "result")}
            self._held["call"].write(station.call)

    def inspect_node(self) -> NodeFacts:
        """Returns what this node is, and whether a task can run here."""
        return self.inspect(socket.gethostname(), self.address)

    def start(
        self, task: TaskConfig, environ: Mapping[str, str], host: str, attempt: int
    ) -> tuple[int, str]:
        numbers = {name: file.fileno() for name, file in self._held.items()}
        task = msgspec.structs.replace(task, descriptors=numbers)
        return super().start(task, environ, host, attempt)

    def returned(self) -> bytes:
        """Returns what the function has returned, as it stands in the file of results."""
        with suppress(KeyError):
            file = self._held["result"]
            file.seek(0)
            return file.read()
        return b""


def run_agent(station: Station) -> Iterator[bytes]:
    """Acts for a launcher until it hangs up; yields what the worker's function has returned."""
    agent = SparkAgent(station)
    try:
        asyncio.run(_serve(agent, station))
    except OSError:  # the launcher has hung up
        pass
    finally:
        agent.shut_down()
    yield agent.returned()


async def _serve(agent: SparkAgent, station: Station) -> None:
    context = ssl_context(Certificates(station.certificate), server_side=False)
    connecting = asyncio.open_connection(station.host, station.port, ssl=context, limit=LINE_BYTES)
    try:
        reader, writer = await asyncio.wait_for(connecting, CONNECT_SECONDS)
    except OSError as error:
        raise RuntimeError(
            f"this executor cannot reach the launcher at {station.host}:{station.port} "
            f"(spark.driver.host): {str(error) or 'no answer'}"
        ) from error
    agent.address = writer.get_extra_info("sockname")[0]
    writer.write(b"%d\n" % station.number)
    loop, tasks = asyncio.get_running_loop(), set[asyncio.Task[None]]()

    async def answer_one(line: bytes) -> None:
        writer.write(await loop.run_in_executor(pool, answer, agent, line))

    with ThreadPoolExecutor(AT_A_TIME) as pool:
        try:
            while line := await reader.readline():
                tasks.add(task := loop.create_task(answer_one(line)))
                task.add_done_callback(tasks.discard)
        finally:
            writer.close()
            await loop.run_in_executor(None, agent.shut_down)

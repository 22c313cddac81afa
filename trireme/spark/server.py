"""The launcher's server, to which agents connect by TLS. It runs in a thread of its own."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

from trireme.agents.calls import AgentLostError, Calls
from trireme.certificates import Certificates, encryption
from trireme.errors import ConfigurationError
from trireme.spark.agent import LINE_BYTES
from trireme.tls.transport import ssl_context

_SECONDS = 10.0  # to start, to end, and for an agent to say which it is


class AgentConnection:
    """The launcher's connection with one agent. Calls wait until the agent has connected."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._waiting: list[bytes] = []
        self._writer: asyncio.StreamWriter | None = None
        self._ended = False
        self._calls = Calls(lambda line: loop.call_soon_threadsafe(self._send, line))

    def call(self, method: str, *arguments: object) -> Future[Any]:
        return self._calls.call(method, *arguments)

    def is_loss(self, error: BaseException) -> bool:
        return isinstance(error, AgentLostError)

    def lose(self, why: str) -> None:
        """Ends the agent and its task. An agent that connects later is refused."""
        self._calls.lose(why)
        with suppress(RuntimeError):  # the server is closed
            self._loop.call_soon_threadsafe(self._abort)

    def end(self) -> None:
        self.lose("the launcher has ended it")

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Sends the calls, and takes the answers, until one of the two disconnects."""
        if self._writer is not None or self._ended:  # it is Spark's second try
            return
        self._writer = writer
        writer.writelines(self._waiting)
        self._waiting.clear()
        try:
            while (line := await reader.readline()).endswith(b"\n"):
                self._calls.take(line)
        finally:
            self._calls.lose("it is gone, or its executor is")

    def _send(self, line: bytes) -> None:
        if self._writer is None:
            self._waiting.append(line)
        else:
            self._writer.write(line)

    def _abort(self) -> None:
        self._ended = True
        if self._writer is not None:
            self._writer.transport.abort()


class AgentServer:
    """Accepts agents. Each has a certificate that this server has issued."""

    def __init__(self, host: str) -> None:
        self._authority = encryption().make_authority()
        self._connections: dict[int, AgentConnection] = {}
        started = Future[tuple[asyncio.AbstractEventLoop, asyncio.Event, int]]()
        self._thread = threading.Thread(
            target=lambda: asyncio.run(self._serve(host, started)), daemon=True
        )
        self._thread.start()
        try:
            self._loop, self._over, self.port = started.result(_SECONDS)
        except OSError as error:
            raise ConfigurationError(
                f"the launcher cannot listen at {host} ({error}): set spark.driver.bindAddress to "
                "an address of this host"
            ) from error

    def close(self) -> None:
        """Closes all connections."""
        self._loop.call_soon_threadsafe(self._over.set)
        self._thread.join(_SECONDS)

    def open(self, name: str) -> tuple[int, str, AgentConnection]:
        """Returns the number, the certificate and the connection of a new agent."""
        number, connection = len(self._connections), AgentConnection(self._loop)
        self._connections[number] = connection
        return number, self._authority.issue(name.partition("/")[0]), connection

    async def _serve(self, host: str, started: Future[Any]) -> None:
        own, over = Certificates(self._authority.issue("coordinator:0")), asyncio.Event()
        try:
            context = ssl_context(own, server_side=True)
            limits: dict[str, Any] = {"limit": LINE_BYTES, "ssl_handshake_timeout": _SECONDS}
            server = await asyncio.start_server(self._answer, host, 0, ssl=context, **limits)
        except Exception as error:  # whoever started the thread raises it
            started.set_exception(error)
            return
        port = server.sockets[0].getsockname()[1]
        started.set_result((asyncio.get_running_loop(), over, port))
        await over.wait()
        server.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            said = await asyncio.wait_for(reader.readline(), _SECONDS)
            if (connection := self._connections.get(int(said))) is not None:
                await connection.serve(reader, writer)
        except (OSError, ValueError, asyncio.CancelledError):
            pass  # it is no agent, it sent half a line, or the server ends
        finally:
            writer.transport.abort()

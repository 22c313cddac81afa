"""The lines of a job's launcher to its agents, which call it: a server of TLS in a thread."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import Future
from typing import Any

from trireme.agents.calls import AgentLostError, Calls
from trireme.certificates import Certificates, encryption
from trireme.spark.agent import LINE_BYTES
from trireme.tls.transport import ssl_context

_SECONDS = 10.0  # that a caller has to say which agent it is


class Line:
    """The launcher's end of an agent. What is said before the agent has called waits for that."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._waiting: list[bytes] = []
        self._writer: asyncio.StreamWriter | None = None
        self._hung_up = False
        self._calls = Calls(lambda line: loop.call_soon_threadsafe(self._send, line))

    def call(self, method: str, *arguments: object) -> Future[Any]:
        return self._calls.call(method, *arguments)

    def is_loss(self, error: BaseException) -> bool:
        return isinstance(error, AgentLostError)

    def lose(self, why: str) -> None:
        """Ends the agent, with its task. It is refused where it calls later."""
        self._calls.lose(why)
        self._loop.call_soon_threadsafe(self._hang_up)

    def end(self) -> None:
        self.lose("the launcher has ended it")

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Speaks with the agent that has called, until one of the two hangs up."""
        if self._writer is not None or self._hung_up:  # it is Spark's second try
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

    def _hang_up(self) -> None:
        self._hung_up = True
        if self._writer is not None:
            self._writer.transport.abort()


class Switchboard:
    """Answers agents, each of which has a certificate that was made for it."""

    def __init__(self, host: str) -> None:
        self._authority = encryption().make_authority()
        self._lines: dict[int, Line] = {}
        serving = Future[tuple[asyncio.AbstractEventLoop, asyncio.Event, int]]()
        self._thread = threading.Thread(
            target=lambda: asyncio.run(self._serve(host, serving)), daemon=True
        )
        self._thread.start()
        self._loop, self._over, self.port = serving.result()

    def close(self) -> None:
        """Hangs up. Call it when nothing is said to the lines any more."""
        self._loop.call_soon_threadsafe(self._over.set)
        self._thread.join()

    def open(self, name: str) -> tuple[int, str, Line]:
        """Returns the number and the certificate of a new agent of a task, and its line."""
        number, line = len(self._lines), Line(self._loop)
        self._lines[number] = line
        return number, self._authority.issue(name.partition("/")[0]), line

    async def _serve(self, host: str, serving: Future[Any]) -> None:
        own, over = Certificates(self._authority.issue("coordinator:0")), asyncio.Event()
        try:
            context = ssl_context(own, server_side=True)
            limits: dict[str, Any] = {"limit": LINE_BYTES, "ssl_handshake_timeout": _SECONDS}
            server = await asyncio.start_server(self._answer, host, 0, ssl=context, **limits)
        except OSError as error:
            serving.set_exception(error)
            return
        port = server.sockets[0].getsockname()[1]
        serving.set_result((asyncio.get_running_loop(), over, port))
        await over.wait()
        server.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            said = await asyncio.wait_for(reader.readline(), _SECONDS)
            if (line := self._lines.get(int(said))) is not None:
                await line.serve(reader, writer)
        except (OSError, ValueError, asyncio.CancelledError):
            pass  # a stranger, a line that was cut, or the end
        finally:
            writer.transport.abort()

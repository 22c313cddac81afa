"""Calls of an agent's methods as lines of text, for clusters without calls of their own.

A request and an answer are a line of JSON each. They go by whatever an engine has: the standard
input and output of a step, or a connection.
"""

from __future__ import annotations

import signal
from collections.abc import Callable
from concurrent.futures import Future
from threading import Lock
from typing import Any

import msgspec

from trireme.agents.agent import NodeFacts, TaskAgent, TaskReport
from trireme.launch.config.task_config import TaskConfig

AT_A_TIME = 4
"""The calls that an agent answers at a time: one waits for news, others end the task."""

SIGNATURES: dict[str, tuple[Any, Any]] = {
    "inspect_node": (tuple[()], NodeFacts),
    "launcher_address": (tuple[()], str),
    "start": (tuple[TaskConfig, dict[str, str], str, int], tuple[int, str]),
    "report": (tuple[float], TaskReport),
    "send_signal": (tuple[signal.Signals, int], None),
    "shut_down": (tuple[()], None),
}
"""The methods of an agent, each with the types of its arguments and of its result."""


class Request(msgspec.Struct, frozen=True, array_like=True):
    """A call of a method of the agent."""

    number: int
    method: str
    arguments: msgspec.Raw


class Answer(msgspec.Struct, frozen=True, array_like=True):
    """The result of a call, or its error."""

    number: int
    result: msgspec.Raw
    error: str = ""


class AgentLostError(Exception):
    """The agent is gone."""


def answer(agent: TaskAgent, line: bytes) -> bytes:
    """Makes the call that a line requests, and returns the line of the answer."""
    request, result, error = msgspec.json.decode(line, type=Request), b"null", ""
    try:
        kinds, _ = SIGNATURES[request.method]
        arguments = msgspec.json.decode(request.arguments, type=kinds)
        call: Callable[..., object] = getattr(agent, request.method)
        result = msgspec.json.encode(call(*arguments))
    except Exception as problem:
        error = f"{type(problem).__name__}: {problem}"
    return msgspec.json.encode(Answer(request.number, msgspec.Raw(result), error)) + b"\n"


class Calls:
    """The calls that a launcher makes of one agent. Any thread may call.

    Args:
        send: sends one line to the agent. It must not raise.
    """

    def __init__(self, send: Callable[[bytes], object]) -> None:
        self._send = send
        self._lock = Lock()
        self._open: dict[int, tuple[str, Future[Any]]] = {}
        self._number = 0
        self._lost = ""  # why, once it is

    def call(self, method: str, *arguments: object) -> Future[Any]:
        """Requests a call; the future fails with an `AgentLostError` where the agent is gone."""
        future: Future[Any] = Future()
        with self._lock:
            self._number += 1
            packed = msgspec.Raw(msgspec.json.encode(arguments))
            line = msgspec.json.encode(Request(self._number, method, packed))
            if not self._lost:
                self._open[self._number] = method, future
                self._send(line + b"\n")
                return future
        future.set_exception(AgentLostError(self._lost))
        return future

    def take(self, line: bytes) -> None:
        """Takes the line of an answer."""
        answer = msgspec.json.decode(line, type=Answer)
        with self._lock:
            method, future = self._open.pop(answer.number)
        if answer.error:
            future.set_exception(RuntimeError(answer.error))
        else:
            future.set_result(msgspec.json.decode(answer.result, type=SIGNATURES[method][1]))

    def lose(self, why: str) -> None:
        """Fails all calls that were not answered, and all that are made from now on."""
        with self._lock:
            self._lost = self._lost or why
            unanswered, self._open = [*self._open.values()], {}
        for _, future in unanswered:
            future.set_exception(AgentLostError(self._lost))

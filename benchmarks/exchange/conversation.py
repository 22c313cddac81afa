"""A peer's program in an environment of its own, which answers lines of JSON with lines of JSON."""

from __future__ import annotations

import json
import select
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.processes import Program

_START_SECONDS = 120.0
_ANSWER_SECONDS = 120.0


class Conversation:
    """A program that is running, and says a line once it is ready.

    Args:
        peer: whose program it is, in errors.
        command: what to run.
        directory: where it runs and writes its log.
        extra: more of its environment.

    Attributes:
        program: its process.

    Raises:
        RuntimeError: the program has ended.
        TimeoutError: it does not get ready.
    """

    def __init__(
        self,
        peer: str,
        command: Sequence[str],
        directory: Path,
        extra: Mapping[str, str] | None = None,
    ) -> None:
        self._peer = peer
        self.program = Program(
            command, log=directory / "log.txt", directory=directory, extra=extra, talk=True
        )
        try:
            self._read(_START_SECONDS)
        except BaseException:
            self.close()
            raise

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """Sends a request and returns its answer.

        Raises:
            RuntimeError: the program has ended.
            TimeoutError: it does not answer.
        """
        self.program.check()
        assert self.program.process.stdin is not None
        self.program.process.stdin.write(json.dumps(request) + "\n")
        self.program.process.stdin.flush()
        return self._read(_ANSWER_SECONDS)

    def _read(self, seconds: float) -> dict[str, Any]:
        output = self.program.process.stdout
        assert output is not None
        if not select.select([output], [], [], seconds)[0]:
            tail = self.program.tail()
            raise TimeoutError(f"{self._peer} said nothing for {seconds:.0f} s: {tail}")
        line = output.readline()
        if not line:
            self.program.process.wait(10)
            self.program.check()
        answer: dict[str, Any] = json.loads(line)
        return answer

    def close(self) -> None:
        """Ends the program and all that it started."""
        self.program.kill()

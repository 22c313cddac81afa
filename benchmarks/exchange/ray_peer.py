"""Push and pull by Ray, in its own environment: one Ray for all sizes, actors for each."""

from __future__ import annotations

import json
import select
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.exchange.contender import Exchange
from benchmarks.machine import ROOT
from benchmarks.processes import Program

_STORE_BYTES = 3 << 30
_START_SECONDS = 120.0
_ANSWER_SECONDS = 120.0


class Ray:
    """A running Ray.

    Args:
        python: the interpreter of its environment.
        scratch: where it may write.
    """

    def __init__(self, python: Path, scratch: Path) -> None:
        directory = scratch / "ray"
        directory.mkdir()
        program = str(ROOT / "benchmarks" / "programs" / "ray_exchange.py")
        self.program = Program(
            [str(python), program, str(_STORE_BYTES)],
            log=directory / "log.txt",
            directory=directory,
            extra={"RAY_USAGE_STATS_ENABLED": "0", "PYTHONWARNINGS": "ignore"},
            talk=True,
        )
        self._read(_START_SECONDS)

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """Sends a request and returns its answer.

        Raises:
            RuntimeError: Ray has ended.
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
            raise TimeoutError(f"Ray said nothing for {seconds:.0f} s: {self.program.tail()}")
        line = output.readline()
        if not line:
            self.program.process.wait(10)
            self.program.check()
        answer: dict[str, Any] = json.loads(line)
        return answer

    def close(self) -> None:
        """Ends Ray and all its processes."""
        self.program.kill()


class _RayExchange(Exchange):
    def __init__(self, name: str, burst: float, ray: Ray, nbytes: int, servers: int) -> None:
        super().__init__(name, burst)
        self._ray = ray
        self._request = {"numbers": nbytes // 4 // servers, "servers": servers}
        ray.ask(self._request)

    @property
    def pids(self) -> Sequence[int]:
        return [self._ray.program.pid]  # the actors descend from it

    def exchange(self, count: int) -> float:
        return float(self._ray.ask({"count": count})["seconds"])

    def close(self) -> None:
        self._ray.ask({"numbers": 1, "servers": 0})


def ray_exchange(name: str, ray: Ray, nbytes: int, burst: float, *, servers: int) -> Exchange:
    """Makes the actors of one size; those of the size before are gone then."""
    return _RayExchange(name, burst, ray, nbytes, servers)

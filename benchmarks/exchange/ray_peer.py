"""Push and pull by Ray, in its own environment: one Ray for all sizes, actors for each."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.exchange.contender import Exchange
from benchmarks.exchange.conversation import Conversation
from benchmarks.machine import ROOT

_STORE_BYTES = 3 << 30


class Ray:
    """A running Ray.

    Args:
        python: the interpreter of its environment.
        scratch: where it may write.

    Raises:
        RuntimeError, TimeoutError: it does not start.
    """

    def __init__(self, python: Path, scratch: Path) -> None:
        directory = scratch / "ray"
        directory.mkdir()
        program = str(ROOT / "benchmarks" / "programs" / "ray_exchange.py")
        self._conversation = Conversation(
            "Ray",
            [str(python), program, str(_STORE_BYTES)],
            directory,
            extra={"RAY_USAGE_STATS_ENABLED": "0", "PYTHONWARNINGS": "ignore"},
        )
        self.pid = self._conversation.program.pid

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """Sends a request and returns its answer: see `Conversation.ask`."""
        return self._conversation.ask(request)

    def close(self) -> None:
        """Ends Ray and all its processes."""
        self._conversation.close()


class _RayExchange(Exchange):
    def __init__(self, name: str, burst: float, ray: Ray, nbytes: int, servers: int) -> None:
        super().__init__(name, burst)
        self._ray = ray
        self._request = {"numbers": nbytes // 4 // servers, "servers": servers}
        ray.ask(self._request)

    @property
    def pids(self) -> Sequence[int]:
        return [self._ray.pid]  # the actors descend from it

    def exchange(self, count: int) -> float:
        return float(self._ray.ask({"count": count})["seconds"])

    def close(self) -> None:
        self._ray.ask({"numbers": 1, "servers": 0})


def ray_exchange(name: str, ray: Ray, nbytes: int, burst: float, *, servers: int) -> Exchange:
    """Makes the actors of one size; those of the size before are gone then."""
    return _RayExchange(name, burst, ray, nbytes, servers)

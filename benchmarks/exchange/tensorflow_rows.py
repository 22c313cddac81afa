"""Rows by TensorFlow's parameter servers, in an environment of its own."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from benchmarks.exchange.contender import Exchange
from benchmarks.exchange.conversation import Conversation
from benchmarks.machine import ROOT
from benchmarks.processes import Program, free_ports
from benchmarks.table_rows import OPTIMIZER

_PROGRAM = ROOT / "benchmarks" / "programs" / "tensorflow_rows.py"


class _TensorFlowRows(Exchange):
    def __init__(
        self, name: str, burst: float, worker: Conversation, servers: Sequence[Program]
    ) -> None:
        super().__init__(name, burst)
        self._worker = worker
        self._servers = servers

    @property
    def pids(self) -> Sequence[int]:
        return [self._worker.program.pid, *(server.pid for server in self._servers)]

    def exchange(self, count: int) -> float:
        return float(self._worker.ask({"count": count})["seconds"])

    def close(self) -> None:
        self._worker.close()
        for server in self._servers:
            server.kill()


def tensorflow_rows(
    name: str,
    burst: float,
    python: Path,
    scratch: Path,
    rows: int,
    *,
    servers: int,
    exponent: float | None,
) -> Exchange:
    """Starts a job of TensorFlow's parameter servers with one worker.

    Args:
        name: in the results.
        burst: how many seconds one measurement should take.
        python: the interpreter of TensorFlow's environment.
        scratch: where it may write.
        rows: of the table.
        servers: how many servers it is divided among.
        exponent: of Zipf's law, by which keys are drawn; None for uniform ones.

    Raises:
        RuntimeError, TimeoutError: it does not start.
    """
    directory = Path(tempfile.mkdtemp(prefix="tensorflow-", dir=scratch))
    addresses = [f"127.0.0.1:{port}" for port in free_ports(servers + 1)]
    common = [str(python), str(_PROGRAM), "--ps", ",".join(addresses[:-1])]
    common += ["--worker", addresses[-1]]
    with ExitStack() as started:
        programs = []
        for index in range(servers):
            program = Program(
                [*common, "--job", "ps", "--rank", str(index)],
                log=directory / f"ps-{index}.txt",
                directory=directory,
            )
            started.callback(program.kill)
            programs.append(program)
        options = ["--rows", str(rows), "--rate", str(OPTIMIZER.lr)]
        if exponent is not None:
            options += ["--exponent", str(exponent)]
        worker = Conversation("TensorFlow", [*common, "--job", "worker", *options], directory)
        started.pop_all()
    return _TensorFlowRows(name, burst, worker, programs)

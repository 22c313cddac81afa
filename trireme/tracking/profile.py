"""Traces: the operations of every task during a few steps, on one timeline.

    trireme.Session(..., hooks=[trireme.Profile("10:15")])     # or: trireme run --profile 10:15

writes `RUN/traces/steps-10-15.json.gz`, which https://ui.perfetto.dev opens.

Each worker traces its own steps 10 to 14 and shares its part at shard 0, or without servers in the
store of the process group; the chief merges all parts with the notes of the servers. All times are
by the time of day, as each host has it.
"""

from __future__ import annotations

import logging
import math
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from trireme.errors import ConfigurationError
from trireme.session.hooks import Hook
from trireme.tracking.server_trace import ServerTraces
from trireme.tracking.trace import (
    MESSAGE,
    STAGE,
    ServerPart,
    TraceSpan,
    WorkerPart,
    merge,
    pack,
    unpack,
    write_trace,
)

if TYPE_CHECKING:
    from trireme.session.backends.servers import ServerBackend
    from trireme.session.result import StepResult
    from trireme.session.session import Session

_log = logging.getLogger(__name__)

_LOOK_SECONDS = 1.0
_PATIENCE = 30.0  # seconds, at the end, for the parts of the other processes
_POLL_SECONDS = 0.05
_BACKENDS = ("gloo:", "nccl:")
_CATEGORIES = ("cpu_op", "user_annotation", "kernel", "gpu_memcpy", "gpu_memset", "cuda_runtime")


class Profile(Hook):
    """Traces a few steps of every task."""

    def __init__(
        self, steps: str, *, operators: bool = True, directory: str | Path | None = None
    ) -> None:
        first, _, end = steps.partition(":")
        if not (first.isdecimal() and end.isdecimal() and int(first) < int(end)):
            raise ConfigurationError(
                f"steps {steps!r} are not a range: give the steps to trace as first:end, such as "
                "10:15"
            )
        self.first, self.end = int(first), int(end)
        self._topic = f"trace/{self.first}-{self.end}"
        self._operators = operators
        self._directory = None if directory is None else Path(directory)
        self._made = 0  # steps, so far
        self._tracing: _Tracing | None = None
        self._look_at = math.inf  # when the parts are gathered, once this worker has shared its own

    def on_start(self, session: Session) -> None:
        if self._operators:
            import torch.profiler  # noqa: F401  # takes seconds, so not during a step
        if self._directory is not None:
            return
        records = session.task.records  # in the launch's run directory
        run_dir = session.run_dir if records is None else Path(records).parent
        if run_dir is None:
            raise ConfigurationError(
                "a trace has no directory: set a run directory (--run-dir, or run_dir=), or give "
                "Profile(directory=...)"
            )
        self._directory = run_dir / "traces"

    def before_step(self, session: Session, batch: Any) -> None:
        if self._made == self.first:
            self._tracing = _Tracing(session, operators=self._operators)
        if self._tracing is not None:
            self._tracing.begin_step()

    def after_step(self, session: Session, result: StepResult) -> None:
        self._made += 1
        if self._tracing is not None:
            self._tracing.end_step(self._made - 1)
            if self._made == self.end:
                self._leave(session)
        elif time.monotonic() >= self._look_at:
            self._look_at = time.monotonic() + _LOOK_SECONDS
            self._gather(session, wait_for_all=True)

    def on_stop(self, session: Session, reason: str) -> None:
        if self._tracing is not None:
            self._leave(session)
        if self._look_at < math.inf:
            self._gather(session, wait_for_all=False)

    # -- inside ---------------------------------------------------------------------------------

    def _leave(self, session: Session) -> None:
        """Ends tracing, and shares this worker's part."""
        assert self._tracing is not None
        part = self._tracing.finish()
        self._tracing = None
        if session.worker.lifecycle.servers is not None or session.worker.backend.together:
            self._look_at = 0.0
            session.worker.backend.share(self._topic, pack(part))
        else:  # alone, or a process of a worker that another one represents at the servers
            self._write(session, [part], [], name="" if session.is_chief else f".{part.task}")

    def _gather(self, session: Session, *, wait_for_all: bool) -> None:
        """Merges the parts, as chief; with `wait_for_all`, once all workers have shared theirs."""
        if not session.is_chief:
            return
        backend, connected = session.worker.backend, session.worker.lifecycle.servers
        wanted = set(range(session.task.workers))
        parts = backend.collect(self._topic)
        deadline = time.monotonic() + (_PATIENCE if connected is None else 0.0)
        while missing := wanted - set(parts):
            if wait_for_all:
                return
            if time.monotonic() >= deadline:
                names = ", ".join(f"worker:{index}" for index in sorted(missing))
                session.worker.progress.warn(
                    f"the trace of steps {self.first} to {self.end - 1} lacks {names}"
                )
                break
            time.sleep(_POLL_SECONDS)
            parts = backend.collect(self._topic)
        workers = []
        for index, data in sorted(parts.items()):
            try:
                workers.append(unpack(data))
            except ValueError as error:
                session.worker.progress.warn(f"the trace lacks worker:{index}: {error}")
        servers: list[ServerPart] = []
        if connected is not None:
            traces = _traces(session, connected)
            servers = [ServerPart(at, *said) for at, said in sorted(traces.ask("read").items())]
            traces.close()
        self._write(session, workers, servers)
        if connected is not None:
            backend.share(self._topic, b"")  # else servers keep megabytes for each trace

    def _write(
        self,
        session: Session,
        workers: Sequence[WorkerPart],
        servers: Sequence[ServerPart],
        name: str = "",
    ) -> None:
        assert self._directory is not None
        self._look_at = math.inf
        stem = f"steps-{self.first}-{self.end}{name.replace(':', '-').replace('/', '-')}"
        path = self._directory / f"{stem}.json.gz"
        try:
            write_trace(path, merge(workers, servers))
        except OSError as error:  # monitoring must not end the job
            _log.warning("the trace of steps %d to %d is lost: %s", self.first, self.end, error)
            return
        session.worker.progress.message(f"trace: {path} (https://ui.perfetto.dev opens it)")


def _traces(session: Session, connected: ServerBackend) -> ServerTraces:
    view = session.worker.lifecycle.view
    assert view is not None  # it has joined
    return ServerTraces(connected.options, view)


class _Tracing:
    """One worker's trace while it is made."""

    def __init__(self, session: Session, *, operators: bool) -> None:
        self._recorder = session.recorder
        self._task = session.task
        self._pipeline = session.pipeline
        self._began = 0.0
        self._mark = 0  # of the operations of the pipeline, in its log
        self._spans: list[TraceSpan] = []
        self._servers = None
        if (connected := session.worker.lifecycle.servers) is not None:
            self._servers = _traces(session, connected)
            self._servers.ask("start")
        self._offset = time.time() - time.monotonic()
        self._profiler = None
        if operators:
            from torch.profiler import profile

            self._profiler = profile()  # of all that torch can trace here, such as CUDA
            self._profiler.start()
        self._recorder.observer = self._saw

    def _saw(self, phase: str, began: float, ended: float) -> None:
        self._spans.append(TraceSpan(phase, "phase", began, ended))

    def begin_step(self) -> None:
        if self._pipeline is not None:
            self._mark = self._pipeline.begin()
        self._began = time.monotonic()

    def end_step(self, number: int) -> None:
        self._spans.append(TraceSpan(f"step {number}", "step", self._began, time.monotonic()))
        if self._pipeline is not None:
            for one in self._pipeline.end(self._mark):
                name = f"{one.kind} {one.stage}, micro-batch {one.microbatch}"
                began, ended = one.start - self._offset, one.stop - self._offset
                self._spans.append(TraceSpan(name, STAGE, began, ended))

    def finish(self) -> WorkerPart:
        self._recorder.observer = None
        if self._servers is not None:
            self._servers.close()
        operators = () if self._profiler is None else _operators(self._profiler, self._offset)
        return WorkerPart(
            task=self._task.name,
            place=self._task.number,
            offset=self._offset,
            spans=(*self._spans, *operators),
        )


def _operator(event: Mapping[str, Any], offset: float) -> TraceSpan:
    began = 1e-6 * float(event["ts"]) + offset
    ended = began + 1e-6 * float(event["dur"])
    # A message goes on while its thread, to which the profiler attributes it, does other things.
    if event["cat"] == "user_annotation" and event["name"].startswith(_BACKENDS):
        return TraceSpan(event["name"], MESSAGE, began, ended)
    return TraceSpan(event["name"], event["cat"], began, ended, int(event["tid"]))


def _operators(profiler: Any, offset: float) -> list[TraceSpan]:
    """Ends the trace of a profiler and returns its operators, with times of `time.monotonic`."""
    profiler.stop()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        trace = msgspec.json.decode(path.read_bytes())
    base = 1e-9 * trace["baseTimeNanoseconds"] - offset
    return [
        _operator(event, base)
        for event in trace["traceEvents"]
        if event.get("ph") == "X" and event.get("cat") in _CATEGORIES
    ]

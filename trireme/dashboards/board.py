"""Writes the chief's summaries for TensorBoard, as event files under `RUN_DIR/tensorboard/RUN/`.

Monitoring must not end a job: if writing fails, a warning is logged and training continues.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from trireme.dashboards.forward_tracer import graph_of
from trireme.errors import ConfigurationError
from trireme.tensors import map_tensors

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

_log = logging.getLogger(__name__)

Scalar = float | torch.Tensor  # a number, or a tensor of one element on any device

_QUEUE_LENGTH = 1000
_LARGE_VALUES = 32
_PATIENCE_SECONDS = 30.0

_Task = Callable[[], object]


class TensorBoard:
    """Writes summaries on a thread of its own.

    `scalars` and `record` cost the caller only a copy of the values: the thread moves them to the
    CPU and encodes them. What reads objects that the caller continues to use, such as figures, is
    written by `write_now`.

    `first_step` is the first global step that this process may log: events that earlier processes
    have written of it, or of later steps, are hidden.
    """

    def __init__(self, directory: str | Path, first_step: int = 0) -> None:
        _require_tensorboard()
        self._directory = Path(directory)
        self._first_step = first_step
        self._writers: dict[str, SummaryWriter] = {}
        self._lock = threading.Lock()
        self._tasks: queue.Queue[_Task | None] = queue.Queue(_QUEUE_LENGTH)
        self._large_values = threading.BoundedSemaphore(_LARGE_VALUES)
        self._failed = False
        self._thread = threading.Thread(target=self._run, name="trireme-tensorboard", daemon=True)
        self._thread.start()
        self._put("the earlier events", self._hide_the_future)

    def scalars(self, step: int, values: Mapping[str, Scalar], run: str = "train") -> None:
        now = time.time()
        copies = {name: _copy(value) for name, value in values.items()}

        def write() -> None:
            from tensorboard.compat.proto.summary_pb2 import Summary

            # All in one event: `add_scalar` takes several times as long for each.
            numbers = [Summary.Value(tag=n, simple_value=float(v)) for n, v in copies.items()]
            events: Any = self._writer(run).file_writer
            events.add_summary(Summary(value=numbers), step, now)

        self._put(", ".join(values), write)

    def record(
        self, method: str, name: str, values: Any, step: int, run: str = "train", **options: Any
    ) -> None:
        if self._failed or not self._large_values.acquire(timeout=_PATIENCE_SECONDS):
            self._give_up(f"{self._directory} does not keep up with what is logged")
            return
        copies = [_copy(value) for value in (values if isinstance(values, tuple) else (values,))]
        options = {"walltime": time.time(), **options}

        def write() -> None:
            try:
                getattr(self._writer(run), method)(name, *copies, step, **options)
            finally:
                self._large_values.release()

        self._put(name, write)

    def write_now(
        self, name: str, write: Callable[[SummaryWriter], object], run: str = "train"
    ) -> None:
        self._try(name, lambda: write(self._writer(run)))

    def submit(
        self, name: str, write: Callable[[SummaryWriter], object], run: str = "train"
    ) -> bool:
        return self._put(name, lambda: write(self._writer(run)))

    def graph(
        self, model: nn.Module, example: Any, devices: Mapping[str, str] | None, run: str = "train"
    ) -> None:
        """Records what a model computes, by the devices of its modules where they are known."""
        # A model that no process has the whole of has no memory: shapes are computed alone.
        if any(parameter.is_meta for parameter in model.parameters()):
            example = map_tensors(example, lambda tensor: tensor.to("meta"))

        def write(writer: SummaryWriter) -> None:
            from trireme.dashboards.events import add_graph  # loads slowly

            add_graph(writer, graph_of(model, example), devices)

        self.write_now(f"the graph of {type(model).__name__}", write, run)

    @property
    def alive(self) -> bool:
        return not self._failed and self._thread.is_alive()

    def flush(self, timeout: float = 30.0) -> bool:
        flushed = threading.Event()

        def flush() -> None:
            self._each_writer(lambda writer: writer.flush())
            flushed.set()

        return self._put("the files", flush) and flushed.wait(timeout)

    def close(self, timeout: float = 60.0) -> None:
        if not self._thread.is_alive():
            return
        try:
            self._tasks.put(None, timeout=timeout)
            self._thread.join(timeout)
        except queue.Full:
            pass
        if self._thread.is_alive():
            self._give_up(f"{self._directory} did not take it within {timeout:g} s")

    def _put(self, name: str, task: _Task) -> bool:
        if self._failed or not self._thread.is_alive():
            return False
        try:
            self._tasks.put(lambda: self._try(name, task), timeout=_PATIENCE_SECONDS)
        except queue.Full:
            self._give_up(f"{self._directory} took nothing for {_PATIENCE_SECONDS:g} s")
            return False
        return True

    def _run(self) -> None:
        while (task := self._tasks.get()) is not None:
            task()
        self._try("the end", lambda: self._each_writer(lambda writer: writer.close()))

    def _try(self, name: str, task: _Task) -> None:
        if self._failed:
            return
        try:
            task()
        except OSError as error:
            self._give_up(str(error))
        except Exception as error:  # from invalid values that the script logged
            _log.warning("TensorBoard cannot show %s: %s", name, error)

    def _give_up(self, reason: str) -> None:
        if not self._failed:
            self._failed = True
            _log.warning("nothing more is written for TensorBoard: %s", reason)

    def _writer(self, run: str) -> SummaryWriter:
        from trireme.dashboards.events import RunWriter

        if ".." in PurePosixPath(run).parts or PurePosixPath(run).is_absolute() or not run:
            raise ValueError(f"{run!r} cannot be the name of a run")
        with self._lock:
            if run not in self._writers:
                directory = self._directory / run
                purge_step = self._first_step if directory.is_dir() else None
                self._writers[run] = RunWriter(str(directory), purge_step=purge_step)
            return self._writers[run]

    def _each_writer(self, act: Callable[[Any], object]) -> None:
        with self._lock:
            writers = list(self._writers.values())
        for writer in writers:
            act(writer)

    def _hide_the_future(self) -> None:
        # Also in runs that this process never logs to, as TensorBoard shows them too.
        for file in self._directory.glob("**/events.out.tfevents.*"):
            run = file.parent.relative_to(self._directory).as_posix()
            if run != ".":
                self._writer(run)


def _require_tensorboard() -> None:
    try:
        import torch.utils.tensorboard  # noqa: F401
    except Exception as error:  # a broken installation fails in many ways
        raise ConfigurationError(
            f"summaries for TensorBoard need the package tensorboard, which cannot be imported "
            f"here ({error}): pip install 'tensorboard>=2.21'"
        ) from error


def _copy(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    return value.copy() if hasattr(value, "__array__") else value

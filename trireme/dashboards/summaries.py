"""The dashboards of TensorBoard in one line: `hooks=[trireme.Summaries(every=100)]`.

Only recorded steps have hooks on the model: other steps cost nothing.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Collection
from typing import TYPE_CHECKING, Any

from trireme.dashboards.capture import Capture
from trireme.dashboards.forward_tracer import ForwardTracer
from trireme.errors import ConfigurationError
from trireme.session.hooks import Hook
from trireme.session.model.batch import inputs_and_targets

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

    from trireme.session.result import StepResult
    from trireme.session.session import Session

KINDS = ("distributions", "graph", "images")  # the kinds of records, for `without`

_log = logging.getLogger(__name__)

_UNWRITTEN = 2  # steps whose copies may wait for the disk
_PATIENCE_SECONDS = 30.0


class Summaries(Hook):
    """Records the values of one step in `every` for TensorBoard.

    The first step is recorded, and then the first at or after each multiple of `every`. Records
    have names such as `conv1/weight/gradient` and `relu1/activation`: histograms, and scalars.
    Pictures of the inputs, transformed, and of the first layer's filters. The model's graph.

    Where processes hold a model in parts, the chief records the parameters that it holds, and of
    the forward pass nothing; under the strategy `graph`, the graph as it is placed.

    Args:
        every: the number of global steps between two records.
        without: kinds to leave out, of `KINDS`.

    Raises:
        ConfigurationError: a value is out of range.
    """

    def __init__(self, every: int = 100, *, without: Collection[str] = ()) -> None:
        if every < 1:
            raise ConfigurationError(f"Summaries(every={every!r}): give a whole number from 1")
        unknown = sorted(set(without) - set(KINDS))
        if unknown:
            raise ConfigurationError(
                f"Summaries(without={without!r}): there is no {unknown[0]!r}; give a list of some "
                f"of {', '.join(KINDS)}"
            )
        self._every = every
        self._kinds = frozenset(KINDS) - set(without)
        self._copies = bool(self._kinds - {"graph"})  # whether values are shown
        self._room = threading.BoundedSemaphore(_UNWRITTEN)
        self._last: int | None = None
        self._capture: Capture | None = None
        self._watch: ForwardTracer | None = None
        self._inputs: Any = None  # of the newest recorded step
        self._off = False

    def on_start(self, session: Session) -> None:
        if session.run_dir is None:
            self._off = True
            if session.is_chief:
                _log.warning("Summaries record nothing: the session has no run directory")
        elif session.is_chief and session.worker.setup.part is not None:
            placed = session.worker.setup.settings.placed
            _log.warning(
                "this process holds a part of the model: Summaries record the parameters and "
                "gradients that are here, and nothing of the forward pass"
                + (" but the graph" if placed else "")
            )

    # -- each step ------------------------------------------------------------------------------

    def before_step(self, session: Session, batch: Any) -> None:
        if self._off:
            return
        step = session.global_step + 1
        if self._last is not None and step // self._every <= self._last // self._every:
            return
        if session.is_chief:
            self._begin(session, batch)

    def after_step(self, session: Session, result: StepResult) -> None:
        if self._capture is not None:
            self._end(session, self._capture, result)

    def _begin(self, session: Session, batch: Any) -> None:
        board = session.board
        if self._watch is not None:  # of a step that failed
            self._watch.__exit__()
        if board is None or not board.alive:
            self._off = True  # it has warned already
            return
        if not self._room.acquire(timeout=_PATIENCE_SECONDS):
            _log.warning("Summaries leave a step out: earlier ones are not written yet")
            return
        capture = self._capture = Capture()
        self._inputs, _ = inputs_and_targets(batch)
        capture.batch(self._inputs)
        if session.worker.setup.part is None:
            observe = capture.observe if self._copies else None
            self._watch = ForwardTracer(session.model, observe, f"worker:{session.task.index}")
            self._watch.__enter__()

    def _end(self, session: Session, capture: Capture, result: StepResult) -> None:
        first, step = self._last is None, result.global_step
        self._last, self._capture = step, None
        if self._watch is not None:
            self._watch.__exit__()
            capture.graph = self._watch.graph
            self._watch = None
        if self._copies:
            capture.parameters(session.parameters)
        if first and "graph" in self._kinds and session.worker.setup.settings.placed:
            session.summary.graph(self._inputs)
        self._inputs = None

        def write(writer: SummaryWriter) -> None:
            try:
                self._write(writer, capture, step, first)
            finally:
                self._room.release()

        assert session.board is not None
        session.board.submit("the summaries", write)

    def _write(self, writer: SummaryWriter, capture: Capture, step: int, first: bool) -> None:
        """Writes a step; in the writing thread."""
        from trireme.dashboards import events

        kinds, graph = self._kinds, capture.graph
        if first and "graph" in kinds and graph:
            events.add_graph(writer, graph)
        if "distributions" in kinds:
            capture.write_values(writer, step)
        if "images" in kinds:
            capture.write_images(writer, step)

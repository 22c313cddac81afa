"""A hook that traces one step of a pipeline and draws its schedule."""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from trireme.errors import ConfigurationError
from trireme.parallel.pipeline_chart import draw
from trireme.session.hooks import Hook

if TYPE_CHECKING:
    from trireme.session.result import StepResult
    from trireme.session.session import Session

_log = logging.getLogger(__name__)

_PATIENCE = 30.0


class PipelineTrace(Hook):
    """Draws which process of a pipeline computed what and when, with the bubbles, at one step.

    The picture is recorded in TensorBoard as the image `pipeline`, and written as `pipeline.png` to
    the run directory, if there is one. Without a pipeline the hook does nothing.

    Args:
        step: the number of this process's step, from 1; the first steps are not typical.
        path: the file of the picture, instead of `pipeline.png`.

    Raises:
        ConfigurationError: the step is below 1.
    """

    def __init__(self, step: int = 20, path: str | Path | None = None) -> None:
        if step < 1:
            raise ConfigurationError(f"PipelineTrace(step={step}): steps count from 1")
        self._step = step
        self._path = None if path is None else Path(path)
        self._made = 0
        self._mark: int | None = None  # of the operations of the step, while they are recorded

    def before_step(self, session: Session, batch: Any) -> None:
        self._made += 1
        pipeline = session.pipeline
        if pipeline is not None and self._made == self._step:
            self._mark = pipeline.begin()

    def after_step(self, session: Session, result: StepResult) -> None:
        pipeline = session.pipeline
        if pipeline is None or self._mark is None:
            return
        mine, self._mark = pipeline.end(self._mark), None
        operations = pipeline.gather(mine, self._made, time.monotonic() + _PATIENCE)
        if not session.is_chief:
            return
        if not operations:
            _log.warning("the pipeline is not drawn: operations of some processes are missing")
            return
        title = f"step {result.global_step}: {pipeline.about}"
        picture = draw(operations, title)
        pixels = np.asarray(picture)
        session.image("pipeline", pixels, dataformats="HWC")
        if self._path is not None or session.run_dir is not None:
            path = self._path or Path(session.run_dir or ".") / "pipeline.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            picture.save(path)

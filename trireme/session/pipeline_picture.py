"""A hook that draws the schedule of a pipeline from one real step."""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from trireme.errors import ConfigurationError
from trireme.monitor.pipeline_chart import draw
from trireme.session.hooks import Hook

if TYPE_CHECKING:
    from trireme.session.result import StepResult
    from trireme.session.session import Session

__all__ = ["PipelinePicture"]

_log = logging.getLogger(__name__)

_PATIENCE = 30.0


class PipelinePicture(Hook):
    """Draws who computed what when, with the bubbles, at one step of a pipeline.

    The picture goes to TensorBoard as the image `pipeline`, and as `pipeline.png` into the run
    directory, if there is one. Without a pipeline it does nothing.

    Args:
        step: at which of this process's steps, from 1; the first ones are not typical.
        path: where to write the picture instead.

    Raises:
        ConfigurationError: the step is below 1.
    """

    def __init__(self, step: int = 20, path: str | Path | None = None) -> None:
        if step < 1:
            raise ConfigurationError(f"PipelinePicture(step={step}): steps count from 1")
        self._step = step
        self._path = None if path is None else Path(path)
        self._made = 0

    def before_step(self, session: Session, batch: Any) -> None:
        self._made += 1
        pipeline = session.pipeline
        if pipeline is not None and self._made == self._step:
            pipeline.work = []

    def after_step(self, session: Session, result: StepResult) -> None:
        pipeline = session.pipeline
        if pipeline is None or pipeline.work is None:
            return
        mine, pipeline.work = pipeline.work, None
        work = pipeline.gather(mine, self._made, time.monotonic() + _PATIENCE)
        if not session.is_chief:
            return
        if not work:
            _log.warning("the pipeline is not drawn: not every process said what it did")
            return
        title = f"step {result.global_step}: {pipeline.about}"
        picture = draw(work, title)
        pixels = np.asarray(picture)
        session.image("pipeline", pixels, dataformats="HWC")
        if self._path is not None or session.run_dir is not None:
            path = self._path or Path(session.run_dir or ".") / "pipeline.png"
            path.parent.mkdir(parents=True, exist_ok=True)
            picture.save(path)

"""Curves of a run: numbers by name, run and step, read back from TensorBoard's event files."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from pathlib import Path

Points = Sequence[tuple[float, float]]
"""Pairs (step, value), by step."""

Curves = dict[str, dict[str, Points]]
"""By the number's name, then by run, such as `train` or `test`."""


def read_curves(directory: Path) -> Curves:
    """Returns every scalar under a directory of event files; none where there are none.

    For steps that were repeated after a resume, the newest values count; values that are not finite
    are left out.
    """
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    logging.getLogger("tensorboard").setLevel(logging.ERROR)
    curves: Curves = {}
    runs = {path.parent for path in directory.glob("**/events.out.tfevents.*")}
    for run in sorted(runs):
        events = EventAccumulator(str(run), size_guidance={"scalars": 0})
        events.Reload()
        for tag in events.Tags()["scalars"]:
            points = {event.step: event.value for event in events.Scalars(tag)}
            finite = [(float(s), v) for s, v in sorted(points.items()) if math.isfinite(v)]
            if finite:
                curves.setdefault(tag, {})[run.relative_to(directory).as_posix()] = finite
    return curves

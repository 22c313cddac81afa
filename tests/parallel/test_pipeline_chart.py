"""The picture of a pipeline's schedule."""

from __future__ import annotations

import numpy as np
import pytest

from trireme.monitor.stage_operation import StageOperation, bubble_fraction
from trireme.parallel.pipeline_chart import COLOURS, draw

WORK = [
    StageOperation(0, 0, "forward", 0, 1.0, 2.0),
    StageOperation(1, 1, "forward", 0, 2.0, 3.0),
    StageOperation(1, 1, "backward", 0, 3.0, 4.0),
    StageOperation(0, 0, "backward", 0, 4.0, 5.0),
]


def test_the_bubble_is_what_is_left_of_all_processes_time() -> None:
    assert bubble_fraction(WORK) == pytest.approx(0.5)
    assert bubble_fraction(WORK[:1]) == 0
    with pytest.raises(ValueError, match="no operations"):
        bubble_fraction([])


def pixels(width: int = 1000) -> np.ndarray:
    return np.asarray(draw(WORK, "a step", width))


def places(row: np.ndarray, colour: str) -> np.ndarray:
    """Which pixels of a row have a colour."""
    return (row == np.array([int(colour[i : i + 2], 16) for i in (1, 3, 5)])).all(axis=1)


def share(row: np.ndarray, colour: str) -> float:
    return float(places(row, colour).mean())


def begin(row: np.ndarray, colour: str) -> int:
    return int(np.nonzero(places(row, colour))[0][0])


def test_bars_lie_in_their_process_row_and_are_as_long_as_the_work() -> None:
    picture = pixels()
    assert picture.shape == (66 + 2 * 54 + 46, 1000, 3)
    bar = 1 - (108 + 24) / 1000  # of the picture's width
    for top in (70, 70 + 54):
        row = picture[top]
        assert share(row, COLOURS["forward"]) == pytest.approx(bar / 4, abs=0.01)
        assert share(row, COLOURS["backward"]) == pytest.approx(bar / 4, abs=0.01)
        assert share(row, COLOURS["weight"]) == 0
        assert begin(row, COLOURS["forward"]) < begin(row, COLOURS["backward"])
    assert begin(picture[70], COLOURS["forward"]) == 108
    assert begin(picture[124], COLOURS["forward"]) == pytest.approx(108 + 868 / 4, abs=2)


def test_what_is_narrow_has_no_number_but_is_there() -> None:
    many = [StageOperation(0, 0, "forward", n, n * 1.0, n + 0.9) for n in range(500)]
    picture = np.asarray(draw(many, "many", 800))
    assert share(picture[70], COLOURS["forward"]) > 0.3

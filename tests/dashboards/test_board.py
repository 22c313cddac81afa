from __future__ import annotations

import builtins
import logging
import sys
import threading
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.util import tensor_util
from torch import nn

from trireme.dashboards.board import TensorBoard
from trireme.dashboards.recording import Curves
from trireme.errors import ConfigurationError
from trireme.session.job_methods import JobMethods


def read(directory: Path, run: str = "train") -> EventAccumulator:
    events = EventAccumulator(
        str(directory / run), size_guidance={"scalars": 0, "images": 0, "histograms": 0}
    )
    events.Reload()
    return events


def curve(directory: Path, name: str, run: str = "train") -> list[tuple[int, float]]:
    return [(event.step, event.value) for event in read(directory, run).Scalars(name)]


class Methods(JobMethods):
    """The methods that log at a step."""

    job: Any = None  # none is joined

    def __init__(self, board: TensorBoard, step: int, model: nn.Module | None = None) -> None:
        settings = types.SimpleNamespace(run_dir=None)
        curves = Curves(
            types.SimpleNamespace(global_step=step, setup=types.SimpleNamespace(settings=settings))
        )
        curves._board = board
        lifecycle = types.SimpleNamespace(is_chief=True)
        worker = types.SimpleNamespace(
            observers={"curves": curves}, lifecycle=lifecycle, global_step=step
        )
        self.job = types.SimpleNamespace(worker=worker)
        self._model = model or nn.Identity()

    @property
    def model(self) -> nn.Module:
        return self._model


def test_scalars_in_runs_of_their_own(tmp_path: Path) -> None:
    board = TensorBoard(tmp_path)
    board.scalars(1, {"loss": 0.5, "accuracy": torch.tensor(0.25)})
    board.scalars(2, {"loss": torch.tensor([0.125]), "accuracy": np.float32(0.5)})
    board.scalars(2, {"accuracy": 0.75}, run="validation")
    board.close()
    assert curve(tmp_path, "loss") == [(1, 0.5), (2, 0.125)]
    assert curve(tmp_path, "accuracy") == [(1, 0.25), (2, 0.5)]
    assert curve(tmp_path, "accuracy", "validation") == [(2, 0.75)]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["train", "validation"]


def test_times_are_those_of_the_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    board = TensorBoard(tmp_path)
    assert board.flush()
    monkeypatch.setattr(time, "time", lambda: 1e9)
    board.scalars(1, {"loss": 1.0})
    monkeypatch.undo()
    board.close()
    assert read(tmp_path).Scalars("loss")[0].wall_time == 1e9


def test_values_are_those_of_the_call(tmp_path: Path) -> None:
    board = TensorBoard(tmp_path)
    hold = threading.Event()
    board._put("hold", lambda: hold.wait(20))
    loss = torch.tensor(1.0)
    weights = torch.ones(4)
    numbers = np.ones(4)
    board.scalars(1, {"loss": loss})
    board.record("add_histogram", "weights", weights, 1)
    board.record("add_histogram", "numbers", numbers, 1)
    loss.zero_()
    weights.zero_()
    numbers[:] = 0
    hold.set()
    board.close()
    assert curve(tmp_path, "loss") == [(1, 1.0)]
    assert read(tmp_path).Histograms("weights")[0].histogram_value.sum == 4
    assert read(tmp_path).Histograms("numbers")[0].histogram_value.sum == 4


def test_logging_does_not_wait_for_the_disk(tmp_path: Path) -> None:
    board = TensorBoard(tmp_path)
    hold = threading.Event()
    board._put("hold", lambda: hold.wait(20))
    for step in range(500):
        board.scalars(step, {"loss": 1.0})
    assert not board.flush(timeout=0.001)
    hold.set()
    assert board.flush()
    assert len(curve(tmp_path, "loss")) == 500
    board.close()


@pytest.fixture
def later(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Moves the wall clock: TensorBoard reads files in the order of the seconds in their names."""
    now = time.time()

    def move() -> None:
        nonlocal now
        now += 60
        monkeypatch.setattr(time, "time", lambda: now)

    return move


def test_a_resumed_run_shows_no_step_twice(tmp_path: Path, later: Callable[[], None]) -> None:
    first = TensorBoard(tmp_path)
    for step in range(1, 9):
        first.scalars(step, {"loss": float(step)})
    first.scalars(6, {"accuracy": 0.6}, run="validation")
    first.close()
    later()
    resumed = TensorBoard(tmp_path, first_step=6)  # the checkpoint was of step 5
    for step in range(6, 11):
        resumed.scalars(step, {"loss": 10.0 * step})
    resumed.close()
    assert curve(tmp_path, "loss") == [
        *((step, float(step)) for step in range(1, 6)),
        *((step, 10.0 * step) for step in range(6, 11)),
    ]
    # Hidden too, though the resumed process has not logged to this run.
    assert curve(tmp_path, "accuracy", "validation") == []


def test_a_run_that_begins_anew_hides_what_was_there(
    tmp_path: Path, later: Callable[[], None]
) -> None:
    for value in (1.0, 2.0):
        later()
        board = TensorBoard(tmp_path)
        board.scalars(0, {"loss": value})
        board.scalars(3, {"loss": value})
        board.close()
    assert curve(tmp_path, "loss") == [(0, 2.0), (3, 2.0)]


def test_images_histograms_audio_text(tmp_path: Path) -> None:
    board = TensorBoard(tmp_path)
    methods = Methods(board, 3)
    methods.summary.image("digit", torch.rand(1, 8, 8))
    methods.summary.image("flat", torch.rand(8, 8), dataformats="HW")
    methods.summary.image("grid", torch.rand(4, 1, 8, 8))
    methods.summary.histogram("weights", torch.randn(100))
    methods.summary.audio("tone", torch.sin(torch.arange(800.0)).reshape(1, -1), sample_rate=8000)
    methods.summary.text("note", "a *word*")
    likely, truth = torch.tensor([0.1, 0.9, 0.8]), torch.tensor([0, 1, 0])
    methods.summary.pr_curve("curve", likely, labels=truth, num_thresholds=11)
    likely.zero_()
    board.close()
    events = read(tmp_path)
    assert {event.step for tag in ("digit", "flat", "grid") for event in events.Images(tag)} == {3}
    assert events.Images("grid")[0].width > events.Images("digit")[0].width == 8
    assert events.Histograms("weights")[0].histogram_value.num == 100
    assert events.Audio("tone")[0].sample_rate == 8000
    curve = tensor_util.make_ndarray(events.Tensors("curve")[0].tensor_proto)
    assert curve.shape == (6, 11)
    assert curve[0, 9] == 1  # above 0.85 there is the true one
    assert curve[1, 9] == 0  # and no other
    assert events.Tensors("note/text_summary")[0].tensor_proto.string_val == [b"a *word*"]


def test_embeddings_and_graphs(tmp_path: Path) -> None:
    board = TensorBoard(tmp_path)
    methods = Methods(board, 2, nn.Sequential(nn.Linear(3, 2), nn.ReLU()))
    methods.summary.embedding("digits", torch.rand(5, 3), metadata=list("abcde"))
    methods.summary.graph(torch.rand(1, 3))
    board.close()
    assert (tmp_path / "train" / "00002" / "digits" / "metadata.tsv").read_text() == "\n".join(
        [*"abcde", ""]
    )
    shapes = {
        node.name: [d.size for s in node.attr["_output_shapes"].list.shape for d in s.dim]
        for node in read(tmp_path).Graph().node
    }
    assert shapes["0/addmm"] == [1, 2]
    assert shapes["0/weight"] == [2, 3]


def test_figures_are_drawn_before_the_call_returns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[tuple[object, int]] = []

    def to_image(figure: object, close: bool = True) -> np.ndarray[Any, Any]:
        drawn.append((figure, threading.get_ident()))
        return np.zeros((3, 4, 4), dtype=np.uint8)

    monkeypatch.setattr("torch.utils.tensorboard.writer.figure_to_image", to_image)
    board = TensorBoard(tmp_path)
    Methods(board, 4).summary.figure("plot", "a figure")
    assert drawn == [("a figure", threading.get_ident())]
    board.close()
    assert [event.step for event in read(tmp_path).Images("plot")] == [4]


def test_what_cannot_be_shown_is_named_and_the_rest_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    board = TensorBoard(tmp_path)
    with caplog.at_level(logging.WARNING):
        Methods(board, 1).summary.image("crooked", torch.rand(2, 3))
        Methods(board, 1).summary.embedding("flat", torch.rand(2))
        board.scalars(1, {"vector": torch.zeros(3)})
        board.scalars(1, {"loss": 1.0}, run="../elsewhere")
        board.scalars(1, {"loss": 2.0})
        board.close()
    assert curve(tmp_path, "loss") == [(1, 2.0)]
    for name in ("crooked", "flat", "vector", "elsewhere"):
        assert sum(name in message for message in caplog.messages) == 1
    assert not (tmp_path.parent / "elsewhere").exists()


def test_a_failing_disk_stops_the_summaries_not_the_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "train").write_text("in the way")
    board = TensorBoard(tmp_path)
    with caplog.at_level(logging.WARNING):
        for step in range(5):
            board.scalars(step, {"loss": 1.0})
        board.record("add_histogram", "weights", torch.ones(3), 1)
        board.close()
    assert len(caplog.messages) == 1
    assert "nothing more is written" in caplog.messages[0]
    assert not board.flush()


def test_closing_ends_the_threads_and_logging_later_does_nothing(tmp_path: Path) -> None:
    before = threading.active_count()
    board = TensorBoard(tmp_path)
    board.scalars(1, {"loss": 1.0})
    board.close()
    board.close()
    assert threading.active_count() == before
    board.scalars(2, {"loss": 1.0})
    board.record("add_histogram", "weights", torch.ones(3), 2)
    assert curve(tmp_path, "loss") == [(1, 1.0)]


def test_closing_keeps_to_its_deadline(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    board = TensorBoard(tmp_path)
    hold = threading.Event()
    board._put("hold", lambda: hold.wait(20))
    board.close(timeout=0.001)
    assert "did not take it" in caplog.text
    hold.set()
    board._thread.join(20)


def test_without_tensorboard_the_error_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = builtins.__import__

    def without(name: str, *args: Any, **options: Any) -> types.ModuleType:
        if name.startswith(("tensorboard", "torch.utils.tensorboard")):
            raise ModuleNotFoundError("No module named 'tensorboard'")
        return original(name, *args, **options)

    for name in list(sys.modules):
        if name.startswith("torch.utils.tensorboard"):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(ConfigurationError, match=r"pip install 'tensorboard>=2\.21'"):
        TensorBoard(tmp_path)
    assert list(tmp_path.iterdir()) == []

"""What the hook records, read back as TensorBoard reads it."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn
from torch.utils.data import TensorDataset

import trireme
from tests.conftest import python_path
from trireme.dashboards.summaries import KINDS, Summaries
from trireme.errors import ConfigurationError

ROOT = Path(__file__).resolve().parents[2]
RANDOM = torch.Generator().manual_seed(0)
IMAGES = TensorDataset(
    torch.rand(60, 1, 8, 8, generator=RANDOM), torch.randint(0, 3, (60,), generator=RANDOM)
)
KINDS_OF_VALUES = ("scalars", "histograms", "images", "audio", "tensors")


def network() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 6), nn.Tanh(), nn.Linear(6, 3)
    )


def inverted(batch: Any, random: torch.Generator) -> Any:
    images, labels = batch
    return 1 - images, labels


def train(run_dir: Path | None, hook: trireme.Hook, steps: int = 7, **options: Any) -> None:
    transform = options.pop("transform", None)
    data = options.pop("data", IMAGES)
    session = trireme.Session(
        options.pop("model", network),
        options.pop("loss", nn.CrossEntropyLoss()),
        lambda parameters: torch.optim.Adam(parameters, lr=0.01),
        run_dir=run_dir,
        max_steps=steps,
        hooks=[hook],
        log_every=1,
        **options,
    )
    with session:
        for batch in session.loader(data, 10, transform=transform):
            session.step(batch)
        if "metrics" in options:
            session.evaluate(data, name="test")


def read(run_dir: Path, run: str = "train") -> EventAccumulator:
    everything = dict.fromkeys(KINDS_OF_VALUES, 0)
    events = EventAccumulator(str(run_dir / "tensorboard" / run), size_guidance=everything)
    events.Reload()
    return events


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("run")
    hook = Summaries(every=3)
    metrics = {"accuracy": trireme.accuracy}
    train(run_dir, hook, transform=inverted, metrics=metrics, checkpoint=None)
    return run_dir


def test_every_layer_has_its_distributions(recorded: Path) -> None:
    events = read(recorded)
    tags = set(events.Tags()["histograms"])
    for layer in ("0", "3", "5"):
        for own in ("weight", "bias", "weight/gradient", "bias/gradient", "pre_activation"):
            assert f"{layer}/{own}" in tags
    assert {"1/activation", "4/activation"} <= tags
    assert len(tags) == 3 * 5 + 2
    for tag in tags:
        # The first step, and then those that are multiples.
        assert [event.step for event in events.Histograms(tag)] == [1, 3, 6]
        for moment in ("mean", "std", "min", "max"):
            assert [event.step for event in events.Scalars(f"{tag}/{moment}")] == [1, 3, 6]
    found = events.Histograms("4/activation")[0].histogram_value
    assert found.num == sum(found.bucket) == 10 * 6
    assert -1 <= found.min < found.max <= 1


def test_the_numbers_are_the_step_s(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 3))
    weight = model[0].weight.detach().clone()
    flat = TensorDataset(IMAGES.tensors[0].flatten(1), IMAGES.tensors[1])
    seen: list[tuple[torch.Tensor, torch.Tensor]] = []

    class Spy(Summaries):
        def after_step(self, session: trireme.Session, result: trireme.StepResult) -> None:
            super().after_step(session, result)
            parameter = session.parameters["0.weight"]
            assert parameter.grad is not None
            seen.append((parameter.detach().clone(), parameter.grad.clone()))

    train(tmp_path, Spy(every=1), steps=2, model=model, data=flat)
    events = read(tmp_path)
    for place, (value, gradient) in enumerate(seen):
        assert events.Scalars("0/weight/mean")[place].value == pytest.approx(value.mean().item())
        found = events.Scalars("0/weight/gradient/max")[place].value
        assert found == pytest.approx(gradient.max().item())
    assert not torch.equal(weight, seen[0][0])


def test_training_is_the_same_with_and_without(tmp_path: Path) -> None:
    ends = []
    for hooked in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Flatten(), nn.Linear(64, 6), nn.Dropout(0.5), nn.Linear(6, 3))
        hook = Summaries(every=1) if hooked else trireme.Hook()
        train(tmp_path / str(hooked), hook, model=model, deterministic=True, checkpoint=None)
        ends.append([p.detach().clone() for p in model.parameters()])
    torch.use_deterministic_algorithms(False)
    for plain, watched in zip(*ends, strict=True):
        assert torch.equal(plain, watched)


def test_pictures(recorded: Path) -> None:
    events = read(recorded)
    tags = {"images/inputs", "0/filters"}
    assert set(events.Tags()["images"]) == tags


def test_the_graph_has_modules_and_devices(recorded: Path) -> None:
    events = read(recorded)
    graph = {node.name: node for node in events.Graph().node}
    assert {"0/convolution", "1/relu", "3/addmm", "5/addmm", "input", "result"} <= set(graph)
    assert graph["0/convolution"].device == "/job:worker/task:0/device:CPU:0"


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_left_out_is_not_there(tmp_path: Path, kind: str) -> None:
    train(tmp_path, Summaries(without=[kind]), steps=2, checkpoint=None)
    events = read(tmp_path)
    tags = events.Tags()
    there = {
        "distributions": bool(tags["histograms"]),
        "graph": tags["graph"],
        "images": bool(tags["images"]),
    }
    assert there == {name: name != kind for name in KINDS}


def test_between_records_no_module_has_a_hook(tmp_path: Path) -> None:
    hooked: list[int] = []

    class Count(Summaries):
        def before_step(self, session: trireme.Session, batch: Any) -> None:
            super().before_step(session, batch)
            hooked.append(sum(len(m._forward_hooks) for m in session.model.modules()))

    train(tmp_path, Count(every=3))
    assert [count > 0 for count in hooked] == [True, False, True, False, False, True, False]


def test_pieces_of_a_batch_are_recorded_by_the_first(tmp_path: Path) -> None:
    train(tmp_path, Summaries(), steps=1, accumulate=2)
    assert read(tmp_path).Histograms("4/activation")[0].histogram_value.num == 5 * 6


def test_without_a_run_directory_it_says_so(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        train(None, Summaries())
    assert "Summaries record nothing" in caplog.text


@pytest.mark.thorough
def test_a_disk_that_fails_does_not_end_the_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "tensorboard").mkdir()
    (tmp_path / "tensorboard" / "train").write_text("in the way")
    with caplog.at_level(logging.WARNING):
        train(tmp_path, Summaries(every=1), checkpoint=None)
    assert sum("nothing more is written" in message for message in caplog.messages) == 1


@pytest.mark.parametrize("options", [{"every": 0}, {"without": ["histogram"]}])
def test_wrong_options_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match=next(iter(options))):
        Summaries(**options)


PARTS = """
import torch, trireme
from torch import nn
from torch.utils.data import TensorDataset

data = TensorDataset(torch.rand(80, 8), torch.randint(0, 3, (80,)))
session = trireme.Session(
    lambda: nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 3)),
    nn.CrossEntropyLoss(),
    lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    max_steps=4,
    checkpoint=None,
    hooks=[trireme.Summaries(every=2)],
)
with session:
    for batch in session.loader(data, 10):
        session.step(batch)
"""


@pytest.mark.thorough
@pytest.mark.processes
def test_of_a_model_in_parts_there_is_what_the_chief_holds(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PARTS)
    launch = ("run", "--strategy", "fsdp", "--workers", "2", "--run-dir", tmp_path / "run")
    environ = {name: value for name, value in os.environ.items() if name != "TRIREME_TASK"}
    ended = subprocess.run(
        [sys.executable, "-m", "trireme", *launch, program],
        env={**environ, "PYTHONPATH": python_path(launch), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert (ended.stdout + ended.stderr).count("this process holds a part of the model") == 1
    events = read(tmp_path / "run")
    assert [event.step for event in events.Histograms("0/weight")] == [1, 2, 4]
    assert events.Histograms("0/weight")[0].histogram_value.num == 8 * 6 / 2  # one of two shards
    assert "0/weight/gradient" in events.Tags()["histograms"]
    assert not events.Tags()["graph"]

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from trireme.dashboards.capture import Capture
from trireme.dashboards.events import RunWriter


def written(values: torch.Tensor, directory: Path) -> EventAccumulator:
    writer = RunWriter(str(directory))
    Capture(values={"w": values}).write_values(writer, 3)
    writer.close()
    events = EventAccumulator(str(directory))
    events.Reload()
    return events


def moments(events: EventAccumulator) -> dict[str, float]:
    return {
        tag.removeprefix("w/"): events.Scalars(tag)[0].value for tag in events.Tags()["scalars"]
    }


def test_moments_and_histogram_are_those_of_the_values(tmp_path: Path) -> None:
    values = torch.randn(50, 40, generator=torch.Generator().manual_seed(0)) * 3 + 100
    events, exact = written(values, tmp_path), values.double()
    assert moments(events) == pytest.approx(
        {
            "mean": exact.mean().item(),
            "std": exact.std(correction=0).item(),
            "min": exact.min().item(),
            "max": exact.max().item(),
        },
        rel=1e-6,
    )
    (event,) = events.Histograms("w")
    found = event.histogram_value
    assert event.step == 3
    assert (found.num, sum(found.bucket)) == (2000, 2000)
    counts = torch.tensor(found.bucket).cumsum(0).tolist()
    below = [(exact <= limit).sum().item() for limit in found.bucket_limit]
    for have, want in zip(counts, below, strict=True):
        assert abs(have - want) <= 1  # values on the edge of a range


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16, torch.int64])
def test_any_dtype(dtype: torch.dtype, tmp_path: Path) -> None:
    found = moments(written(torch.tensor([1, 2, 3, 6], dtype=dtype), tmp_path))
    assert (found["mean"], found["min"], found["max"]) == (3, 1, 6)


def test_what_is_not_finite_is_counted_and_left_out(tmp_path: Path) -> None:
    values = torch.tensor([1.0, math.nan, 3.0, math.inf, -math.inf])
    events = written(values, tmp_path / "some")
    assert events.Histograms("w")[0].histogram_value.num == 2
    assert (moments(events)["not_finite"], moments(events)["mean"]) == (3, 2)
    for number, none in enumerate((torch.tensor([math.nan]), torch.zeros(0))):
        assert not moments(written(none, tmp_path / str(number)))


def test_values_of_millions_keep_their_deviation(tmp_path: Path) -> None:
    values = 1000 + torch.randn(300_000, generator=torch.Generator().manual_seed(1)) / 100
    found = moments(written(values, tmp_path))
    assert found["std"] == pytest.approx(values.double().std().item(), rel=1e-3)

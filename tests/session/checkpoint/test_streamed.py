"""Checkpoints whose tensors are written and read one at a time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.session.checkpoint.samples import assert_same, sample
from trireme.errors import CheckpointError
from trireme.session.checkpoint import CheckpointData, load, save
from trireme.session.checkpoint.streamed import StreamedTensors, joined, renamed


class _Counted:
    """Streams tensors, and counts those that were read."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self.read: list[str] = []
        self._tensors = tensors

    @property
    def streamed(self) -> StreamedTensors:
        shapes = {name: t.to("meta") for name, t in self._tensors.items()}
        return StreamedTensors(shapes, self._read)

    def _read(self, name: str) -> torch.Tensor:
        self.read.append(name)
        return self._tensors[name]


def _files(path: Path) -> dict[str, bytes]:
    return {
        p.name: p.read_bytes() for p in path.iterdir() if p.suffix != ".json" or "index" in p.name
    }


@pytest.mark.parametrize("shard_bytes", [1, 1 << 20])
def test_a_streamed_checkpoint_has_the_same_files(tmp_path: Path, shard_bytes: int) -> None:
    data = sample()
    counted = _Counted(data.model)
    streamed = replace(data, model=counted.streamed)
    one = save(tmp_path / "whole", data, shard_bytes=shard_bytes)
    other = save(tmp_path / "streamed", streamed, shard_bytes=shard_bytes)
    assert _files(one) == _files(other)
    assert sorted(counted.read) == sorted(data.model), "each is read once"


def test_a_tensor_is_read_when_it_is_asked_for(tmp_path: Path) -> None:
    data = sample()
    path = save(tmp_path, data, shard_bytes=1)
    found = load(path, streamed=True)
    assert isinstance(found.model, StreamedTensors)
    assert found.model.shapes["fc.weight"].is_meta
    assert_same(found, data)
    (path / "model-00002-of-00002.safetensors").unlink()
    assert torch.equal(found.model["fc.weight"], data.model["fc.weight"])
    assert torch.equal(found.model["fc.bias"], data.model["fc.bias"])  # of a file that is open


def test_a_damaged_checkpoint_is_noticed_before_a_tensor_is_read(tmp_path: Path) -> None:
    path = save(tmp_path, sample())
    with (path / "model.safetensors").open("r+b") as file:
        file.seek(-1, 2)
        file.write(b"\xff")
    with pytest.raises(CheckpointError, match="is damaged"):
        load(path, streamed=True)


def test_a_tensor_that_a_checkpoint_cannot_hold_is_refused_before_any_is_read(
    tmp_path: Path,
) -> None:
    counted = _Counted({"a": torch.zeros(2), "b": torch.zeros(2, dtype=torch.complex64)})
    with pytest.raises(CheckpointError, match=r"'b' is of torch\.complex64"):
        save(tmp_path, CheckpointData(1, counted.streamed))
    assert counted.read == []


def test_groups_are_joined_and_renamed_without_reading() -> None:
    counted = _Counted({"a": torch.zeros(2), "b": torch.ones(3)})
    both = joined({"a": torch.ones(5), "c": torch.ones(4)}, counted.streamed)
    other = renamed(both, {"x": "b", "y": "c", "a": "a"})
    assert list(both) == ["a", "c", "b"] and "b" in both and "x" not in both
    assert isinstance(other, StreamedTensors) and other.shapes["a"].shape == (2,)
    assert counted.read == []
    assert torch.equal(other["x"], torch.ones(3)) and torch.equal(other["y"], torch.ones(4))
    assert counted.read == ["b"]
    with pytest.raises(KeyError):
        other["b"]

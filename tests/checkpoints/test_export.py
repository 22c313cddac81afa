"""`trireme checkpoint export`: a model as one file."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import safetensors.torch
import torch

from tests.session.checkpoint.samples import assert_same_tensors, sample
from trireme.checkpoints.command import export
from trireme.errors import CheckpointError
from trireme.session.checkpoint import CheckpointData, save


def test_export_is_one_plain_file(tmp_path: Path) -> None:
    tied = torch.ones(4, 2)
    model = {"embedding": tied, "head": tied, "bias": torch.zeros(2, dtype=torch.bfloat16)}
    path = save(tmp_path, CheckpointData(1, model), shard_bytes=8)
    output = tmp_path / "out" / "model.safetensors"
    assert export(path, output) == output
    exported = safetensors.torch.load_file(output)
    assert_same_tensors({name: exported[name] for name in model}, model)
    assert os.listdir(output.parent) == ["model.safetensors"]


def test_export_of_a_damaged_checkpoint_leaves_the_output_alone(tmp_path: Path) -> None:
    path = save(tmp_path, sample())
    output = tmp_path / "model.safetensors"
    output.write_bytes(b"before")
    (path / "average.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"average\.safetensors"):
        export(path, output)
    assert output.read_bytes() == b"before"

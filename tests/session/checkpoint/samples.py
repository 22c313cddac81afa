"""Checkpoints to test with, and ways to damage them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import msgspec
import torch

from trireme.session.checkpoint import CheckpointData, save
from trireme.session.checkpoint.tensors import write_tensors


def sample(step: int = 7, *, width: int = 3) -> CheckpointData:
    """A small checkpoint with every group; its values depend on the step."""
    generator = torch.Generator().manual_seed(step)
    weight = torch.randn(width, 2, generator=generator)
    return CheckpointData(
        step=step,
        model={"fc.weight": weight, "fc.bias": torch.randn(width, generator=generator)},
        optimizer={
            "fc.weight/exp_avg": torch.randn(width, 2, generator=generator),
            "fc.weight/step": torch.tensor(float(step)),
        },
        average={"fc.weight": weight * 0.5},
        state={"seed": 3, "consumed": {"digits": [[0, step * 100]]}, "lr": 0.1},
    )


def sample_tables(
    keys: Mapping[int, float], *, waiting: Mapping[int, int] | None = None
) -> dict[str, torch.Tensor]:
    """The arrays of a table `t` of two columns: by key the value of its row, or its touches."""
    waiting = waiting or {}
    rows = torch.tensor([[keys[key], -keys[key]] for key in sorted(keys)]).reshape(-1, 2)
    ones = torch.ones(len(keys), dtype=torch.int64)
    return {
        "t/keys": torch.tensor(sorted(keys), dtype=torch.int64),
        "t/rows": rows,
        "t/states": rows[:, :1].clone(),
        "t/steps": ones.clone(),
        "t/touches": ones.clone(),
        "t/waiting_keys": torch.tensor(sorted(waiting), dtype=torch.int64),
        "t/waiting_steps": torch.ones(len(waiting), dtype=torch.int64),
        "t/waiting_touches": torch.tensor(
            [waiting[key] for key in sorted(waiting)], dtype=torch.int64
        ),
    }


def sample_changes(
    keys: Mapping[int, float],
    *,
    dropped: Sequence[int] = (),
    waiting: Mapping[int, int] | None = None,
) -> dict[str, torch.Tensor]:
    """What has changed in such a table."""
    gone = torch.tensor(sorted(dropped), dtype=torch.int64)
    return {"t/dropped_keys": gone, **sample_tables(keys, waiting=waiting)}


def raw(tensor: torch.Tensor) -> bytes:
    """The bytes of a tensor, so that NaN equals itself and -0.0 is not 0.0."""
    flat = tensor.detach().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes() if tensor.numel() else b""


def assert_same_tensors(
    left: Mapping[str, torch.Tensor], right: Mapping[str, torch.Tensor]
) -> None:
    assert set(left) == set(right)
    for name in left:
        assert left[name].dtype == right[name].dtype, name
        assert left[name].shape == right[name].shape, name
        assert raw(left[name]) == raw(right[name]), name


def assert_same(left: CheckpointData, right: CheckpointData) -> None:
    assert left.step == right.step
    assert_same_tensors(left.model, right.model)
    assert_same_tensors(left.optimizer, right.optimizer)
    assert_same_tensors(left.average, right.average)
    assert_same_tensors(left.tables, right.tables)
    assert json.dumps(left.state) == json.dumps(right.state)


def seal(body: bytes) -> bytes:
    """The body of a `state.json` with the checksum that it should end with."""
    return body + b'"checksum": "sha256:%s"\n}\n' % hashlib.sha256(body).hexdigest().encode()


def body_of(state: bytes) -> bytes:
    return state[: state.rindex(b'"checksum"')]


def write_with_checksums(path: Path, name: str, content: bytes) -> None:
    """Changes one file of a checkpoint as somebody would who also knows about checksums."""
    (path / name).write_bytes(content)
    fields = json.loads((path / "state.json").read_bytes())
    del fields["checksum"]
    fields["files"][name] = {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    body = json.dumps(fields)[:-1] + ",\n"
    (path / "state.json").write_bytes(seal(body.encode()))


FIRST = replace(sample(1), tables=sample_tables({1: 1.0, 2: 2.0, 9: 3.0}, waiting={4: 1}))
CHANGES = (
    (2, sample_changes({2: 5.0, 4: 6.0}, dropped=[9], waiting={9: 1})),
    (3, {}),
    (4, sample_changes({-3: 1.0}, dropped=[1, 9])),
)
AFTER_CHANGES = sample_tables({-3: 1.0, 2: 5.0, 4: 6.0})


def save_changes(
    run: str | Path,
    whole: CheckpointData = FIRST,
    changes: Sequence[tuple[int, Mapping[str, torch.Tensor]]] = CHANGES,
) -> Path:
    """Writes a checkpoint as an earlier version has: tables as a whole and changes, by step."""
    path = save(run, replace(whole, step=changes[-1][0]))
    assert isinstance(path, Path)
    fields = json.loads((path / "state.json").read_bytes())
    del fields["checksum"]
    for step, tables in changes:
        written = tables or {"/nothing": torch.empty(0, dtype=torch.int64)}
        files = write_tensors(path, f"changes-{step:09d}", written, 1 << 20)
        fields["files"] |= msgspec.to_builtins(files)
    fields |= {"format": 2, "chain": [whole.step, *(step for step, _ in changes)]}
    body = "{\n" + "".join(f"{json.dumps(k)}: {json.dumps(v)},\n" for k, v in fields.items())
    (path / "state.json").write_bytes(seal(body.encode()))
    return path

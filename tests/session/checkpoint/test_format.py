from __future__ import annotations

import hashlib
import json
import os
import stat
from pathlib import Path

import pytest
import safetensors.torch
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from tests.session.checkpoint.samples import (
    assert_same,
    assert_same_tensors,
    body_of,
    sample,
    seal,
    write_with_checksums,
)
from trireme.errors import CheckpointError
from trireme.session.checkpoint import CheckpointData, describe, load, save, verify

DTYPES = [
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint64,
    torch.uint32,
    torch.uint16,
    torch.uint8,
    torch.bool,
]

names = st.text(st.characters(exclude_categories=["Cs"]), max_size=12).filter(
    lambda name: name != "__metadata__"
)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    dtype = draw(st.sampled_from(DTYPES))
    shape = draw(st.lists(st.integers(0, 4), max_size=3))
    count = torch.Size(shape).numel()
    if dtype is torch.bool:
        bits = draw(st.lists(st.booleans(), min_size=count, max_size=count))
        return torch.tensor(bits, dtype=dtype).reshape(shape)
    content = draw(st.binary(min_size=count * dtype.itemsize, max_size=count * dtype.itemsize))
    if not count:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(bytearray(content), dtype=dtype).reshape(shape)


groups = st.dictionaries(names, tensors(), max_size=4)
checkpoints = st.builds(
    CheckpointData,
    step=st.integers(0, 10**12),
    model=groups,
    optimizer=groups,
    average=groups,
    state=st.dictionaries(st.text(), json_values, max_size=4),
)
within_one_directory = settings(
    deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@pytest.mark.thorough
@given(data=checkpoints, shard_bytes=st.sampled_from([1, 16, 100, 2**31]))
@within_one_directory
def test_what_is_loaded_is_what_was_saved(
    tmp_path: Path, data: CheckpointData, shard_bytes: int
) -> None:
    path = save(tmp_path, data, shard_bytes=shard_bytes)
    verify(path)
    assert_same(load(path), data)


def test_names_and_files(tmp_path: Path) -> None:
    path = save(tmp_path, sample(1234))
    assert path == tmp_path / "checkpoints" / "step-000001234-writer-1"
    assert sorted(os.listdir(path)) == [
        "average.safetensors",
        "average.safetensors.index.json",
        "model.safetensors",
        "model.safetensors.index.json",
        "optimizer.safetensors",
        "optimizer.safetensors.index.json",
        "state.json",
    ]
    assert os.listdir(path.parent) == [path.name]


def test_the_files_are_what_other_tools_expect(tmp_path: Path) -> None:
    data = sample()
    path = save(tmp_path, data)
    loaded = safetensors.torch.load_file(path / "model.safetensors")
    assert {name: tensor.tolist() for name, tensor in loaded.items()} == {
        name: tensor.tolist() for name, tensor in data.model.items()
    }
    index = json.loads((path / "model.safetensors.index.json").read_bytes())
    assert index == {
        "metadata": {"total_size": (6 + 3) * 4},
        "weight_map": dict.fromkeys(data.model, "model.safetensors"),
    }
    state = json.loads((path / "state.json").read_bytes())
    for name, record in state["files"].items():
        content = (path / name).read_bytes()
        assert record == {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    assert state["step"] == 7
    assert state["state"] == data.state
    assert state["versions"]["torch"] == torch.__version__


def test_every_tensor_is_aligned_to_its_items(tmp_path: Path) -> None:
    odd = {"a": torch.ones(3, dtype=torch.uint8), "b": torch.ones(3, dtype=torch.float64)}
    path = save(tmp_path, CheckpointData(1, odd)) / "model.safetensors"
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    start = json.loads(content[8 : 8 + length])["b"]["data_offsets"][0]
    assert (8 + length + start) % 8 == 0


def test_large_groups_are_cut_into_shards(tmp_path: Path) -> None:
    model = {f"layer{i}": torch.full((10,), float(i)) for i in range(5)}
    path = save(tmp_path, CheckpointData(1, model), shard_bytes=80)
    shards = [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]
    assert sorted(p.name for p in path.glob("model*")) == [*shards, "model.safetensors.index.json"]
    index = json.loads((path / "model.safetensors.index.json").read_bytes())
    assert list(index["weight_map"].values()) == [shards[i // 2] for i in range(5)]
    assert index["metadata"]["total_size"] == 200
    assert_same_tensors(load(path).model, model)


def test_a_tensor_larger_than_a_shard_has_a_file_to_itself(tmp_path: Path) -> None:
    model = {"small": torch.zeros(1), "large": torch.zeros(100), "last": torch.zeros(1)}
    path = save(tmp_path, CheckpointData(1, model), shard_bytes=16)
    assert len(list(path.glob("model-*-of-00003.safetensors"))) == 3
    assert_same_tensors(load(path).model, model)


def test_tensors_that_share_memory_or_are_strided_or_train(tmp_path: Path) -> None:
    flat = torch.arange(12, dtype=torch.float32)
    model = {
        "first": flat[:6].view(2, 3),
        "tied": flat[:6].view(2, 3),
        "overlapping": flat[3:9],
        "transposed": flat.view(3, 4).t(),
        "expanded": flat[:1].expand(4),
        "every second": flat[::2],
        "trained": nn.Parameter(flat[:2].clone()),
    }
    expected = {name: tensor.detach().clone() for name, tensor in model.items()}
    path = save(tmp_path, CheckpointData(1, model))
    assert_same_tensors(load(path).model, expected)


def test_what_was_loaded_outlives_its_files(tmp_path: Path) -> None:
    path = save(tmp_path, sample())
    data = load(path)
    for file in path.iterdir():
        file.write_bytes(b"")
    assert_same(data, sample())


def test_files_obey_the_umask(tmp_path: Path) -> None:
    previous = os.umask(0o027)
    try:
        path = save(tmp_path, sample())
    finally:
        os.umask(previous)
    assert stat.S_IMODE(path.stat().st_mode) == 0o750
    assert {stat.S_IMODE(file.stat().st_mode) for file in path.iterdir()} == {0o640}


@pytest.mark.parametrize(
    ("tensor", "said"),
    [
        (torch.zeros(2, dtype=torch.complex64), "'x' is of torch.complex64.*float32"),
        (torch.zeros(2, device="meta"), "'x' has no values"),
        (torch.eye(2).to_sparse(), "'x' is sparse"),
    ],
)
def test_a_tensor_that_cannot_be_held_is_named(
    tmp_path: Path, tensor: torch.Tensor, said: str
) -> None:
    with pytest.raises(CheckpointError, match=said):
        save(tmp_path, CheckpointData(1, {"x": tensor}))
    assert os.listdir(tmp_path / "checkpoints") == []


@pytest.mark.parametrize(
    ("state", "said"),
    [
        ({"a": torch.zeros(1)}, "type Tensor is not JSON"),
        ({"a": b"bytes"}, "type bytes is not JSON"),
        ({"a": 10**5000}, "could not be written"),
    ],
)
def test_a_state_that_is_not_json_is_refused(
    tmp_path: Path, state: dict[str, object], said: str
) -> None:
    with pytest.raises(CheckpointError, match=said):
        save(tmp_path, CheckpointData(1, {}, state=state))


def test_a_name_that_the_format_reserves_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="__metadata__"):
        save(tmp_path, CheckpointData(1, {"__metadata__": torch.zeros(1)}))


def test_a_negative_step_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="step -1"):
        save(tmp_path, sample(-1))


def test_a_changed_byte_is_found_wherever_it_is(tmp_path: Path) -> None:
    path = save(tmp_path, sample())
    for file in path.iterdir():
        content = file.read_bytes()
        for position in {*range(0, len(content), 7), len(content) - 1}:
            damaged = bytearray(content)
            damaged[position] ^= 1 << position % 8
            file.write_bytes(damaged)
            with pytest.raises(CheckpointError, match=file.name):
                load(path)
        file.write_bytes(content)
    assert_same(load(path), sample())


def test_truncation_and_extension_are_found(tmp_path: Path) -> None:
    path = save(tmp_path, sample())
    for file in path.iterdir():
        content = file.read_bytes()
        lengths = {*range(0, len(content), 7), len(content) - 1}
        for changed in [*(content[:length] for length in lengths), content + b"\n"]:
            file.write_bytes(changed)
            with pytest.raises(CheckpointError, match=file.name):
                verify(path)
        file.write_bytes(content)


def test_every_missing_file_is_found(tmp_path: Path) -> None:
    path = save(tmp_path, sample())
    for file in path.iterdir():
        content = file.read_bytes()
        file.unlink()
        with pytest.raises(CheckpointError, match=file.name):
            load(path)
        file.write_bytes(content)


@pytest.mark.parametrize("read", [load, verify, describe])
def test_what_is_no_checkpoint_is_called_so(tmp_path: Path, read: object) -> None:
    assert callable(read)
    with pytest.raises(CheckpointError, match=r"has no state\.json"):
        read(tmp_path)
    with pytest.raises(CheckpointError, match=r"has no state\.json"):
        read(tmp_path / "absent")
    (tmp_path / "state.json").mkdir()
    with pytest.raises(CheckpointError, match="cannot be read"):
        read(tmp_path)


@pytest.mark.parametrize("name", ["model.safetensors", "model.safetensors.index.json"])
@given(data=st.data())
@within_one_directory
def test_files_with_right_checksums_and_wrong_content(
    tmp_path: Path, name: str, data: st.DataObject
) -> None:
    path = save(tmp_path, sample())
    content = bytearray((path / name).read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        start = data.draw(st.integers(0, len(content)))
        stop = data.draw(st.integers(start, min(start + 12, len(content))))
        content[start:stop] = data.draw(st.binary(max_size=12))
    write_with_checksums(path, name, bytes(content))
    for read in (load, verify, describe):
        try:
            read(path)
        except CheckpointError as error:
            assert str(path) in str(error)


@given(body=st.binary(max_size=60) | json_values.map(lambda value: json.dumps(value).encode()))
@within_one_directory
def test_a_state_with_the_right_checksum_and_any_content(tmp_path: Path, body: bytes) -> None:
    path = tmp_path / "checkpoint"
    path.mkdir(exist_ok=True)
    for content in (seal(body), seal(b'{"format": 1,\n"step": %s,\n' % body)):
        (path / "state.json").write_bytes(content)
        with pytest.raises(CheckpointError, match=r"state\.json"):
            load(path)


@given(field=st.sampled_from(["step", "versions", "files", "state", "format"]), value=json_values)
@within_one_directory
def test_a_state_with_one_field_of_any_value(tmp_path: Path, field: str, value: object) -> None:
    path = save(tmp_path, sample())
    fields = json.loads(body_of((path / "state.json").read_bytes())[:-2] + b"}")
    fields[field] = value
    (path / "state.json").write_bytes(seal((json.dumps(fields)[:-1] + ",").encode()))
    try:
        load(path)
    except CheckpointError as error:
        assert str(path) in str(error)


@pytest.mark.parametrize(
    "name", ["../model.safetensors", "/etc/passwd", "..", "", "model\0", "model.safetensors\n"]
)
def test_a_state_names_only_files_beside_it(tmp_path: Path, name: str) -> None:
    path = save(tmp_path, sample())
    fields = json.loads((path / "state.json").read_bytes())
    del fields["checksum"]
    fields["files"][name] = {"size": 0, "sha256": hashlib.sha256().hexdigest()}
    (path / "state.json").write_bytes(seal((json.dumps(fields)[:-1] + ",").encode()))
    with pytest.raises(CheckpointError, match=r"state\.json"):
        load(path)


def test_a_format_of_the_future_is_not_called_damaged(tmp_path: Path) -> None:
    path = save(tmp_path, sample())
    body = body_of((path / "state.json").read_bytes())
    (path / "state.json").write_bytes(seal(body.replace(b'"format": 1', b'"format": 3')))
    with pytest.raises(CheckpointError, match=r"format 3 .* newer one"):
        load(path)


def test_describe_says_what_is_there(tmp_path: Path) -> None:
    path = save(tmp_path, sample(12))
    found, shapes = describe(path)
    assert found.step == 12
    assert shapes["model"] == {"fc.weight": ("F32", (3, 2)), "fc.bias": ("F32", (3,))}
    assert shapes["optimizer"]["fc.weight/step"] == ("F32", ())
    assert shapes["average"] == {"fc.weight": ("F32", (3, 2))}
    assert found.state == sample(12).state
    assert found.saved_at.endswith("+00:00")
    files = [file for file in path.iterdir() if file.name != "state.json"]
    assert found.nbytes == sum(file.stat().st_size for file in files)

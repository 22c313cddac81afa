"""Whatever lies in the place of a checkpoint is told in one error, soon, and in little memory.

Each case is read by all that read checkpoints: the library's functions, the commands, and what a
job does that resumes: it passes the damaged one over and goes on from the one before.
"""

from __future__ import annotations

import json
import os
import shutil
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tests.session.checkpoint.samples import (
    assert_same,
    body_of,
    sample,
    seal,
    write_with_checksums,
)
from trireme.cli import main
from trireme.errors import CheckpointError
from trireme.session.checkpoint import (
    CheckpointData,
    describe,
    latest,
    list_checkpoints,
    load,
    save,
    step_of,
    verify,
)

MEMORY = 8 << 20
HUGE = 1 << 40


def checkpoint(step: int) -> CheckpointData:
    """A checkpoint whose model and average have the same names and shapes."""
    data = sample(step)
    return replace(data, average={name: tensor / 2 for name, tensor in data.model.items()})


def rewritten(path: Path, old: str, new: str) -> None:
    """Changes `state.json` as somebody would who also knows about checksums."""
    body = body_of((path / "state.json").read_bytes()).decode()
    assert old in body
    (path / "state.json").write_bytes(seal(body.replace(old, new, 1).encode()))


def with_field(path: Path, text: str) -> None:
    body = body_of((path / "state.json").read_bytes()).decode()
    (path / "state.json").write_bytes(seal((body + text + ",\n").encode()))


def header(path: Path, change: Callable[[bytes], bytes]) -> None:
    """Changes the header of the model's file, and every checksum."""
    content = (path / "model.safetensors").read_bytes()
    size = int.from_bytes(content[:8], "little")
    changed = change(content[8 : 8 + size])
    whole = len(changed).to_bytes(8, "little") + changed + content[8 + size :]
    write_with_checksums(path, "model.safetensors", whole)


def pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def link(path: Path, target: str) -> None:
    path.unlink()
    path.symlink_to(target)


def directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


def sparse(path: Path) -> None:
    os.truncate(path, HUGE)


def of_another_step(path: Path) -> None:
    """All files of step 1, whose checksums are right, in the directory of step 2."""
    shutil.rmtree(path)
    shutil.copytree(path.parent / "step-000000001-writer-1", path)


def mixed(path: Path, *names: str) -> None:
    for name in names:
        shutil.copy(path.parent / "step-000000001-writer-1" / name, path / name)


def swapped(path: Path, one: str, other: str) -> None:
    content = (path / one).read_bytes()
    (path / one).write_bytes((path / other).read_bytes())
    (path / other).write_bytes(content)


def nested(path: Path) -> None:
    with_field(path, f'"deep": {"[" * 200_000}{"]" * 200_000}')


def length(path: Path, size: int) -> None:
    content = bytearray((path / "model.safetensors").read_bytes())
    content[:8] = size.to_bytes(8, "little")
    write_with_checksums(path, "model.safetensors", bytes(content))


STATE, MODEL, INDEX = "state.json", "model.safetensors", "model.safetensors.index.json"

DAMAGES: dict[str, Callable[[Path], None]] = {
    "a pipe for the state": lambda path: pipe(path / STATE),
    "a pipe for the model": lambda path: pipe(path / MODEL),
    "a pipe for the index": lambda path: pipe(path / INDEX),
    "a device for the state": lambda path: link(path / STATE, "/dev/zero"),
    "a device for the model": lambda path: link(path / MODEL, "/dev/zero"),
    "a link in a circle": lambda path: link(path / MODEL, MODEL),
    "a link to another file": lambda path: link(path / MODEL, "/etc/passwd"),
    "a directory for the state": lambda path: directory(path / STATE),
    "a directory for the model": lambda path: directory(path / MODEL),
    "a directory for the index": lambda path: directory(path / INDEX),
    "nothing in the directory": lambda path: [each.unlink() for each in path.iterdir()] and None,
    "no byte in the state": lambda path: os.truncate(path / STATE, 0),
    "no byte in the model": lambda path: os.truncate(path / MODEL, 0),
    "a state of a tebibyte": lambda path: sparse(path / STATE),
    "a model of a tebibyte": lambda path: sparse(path / MODEL),
    "an index of a tebibyte": lambda path: sparse(path / INDEX),
    "a missing file": lambda path: (path / "average.safetensors").unlink(),
    "everything of another step": of_another_step,
    "the state of another step": lambda path: mixed(path, STATE),
    "a model of another step": lambda path: mixed(path, MODEL),
    "a model and its index of another step": lambda path: mixed(path, MODEL, INDEX),
    "two files of equal shapes changed places": lambda path: swapped(
        path, "model.safetensors", "average.safetensors"
    ),
    "another step in the state": lambda path: rewritten(path, '"step": 2', '"step": 3'),
    "a step below zero": lambda path: rewritten(path, '"step": 2', '"step": -2'),
    "a step that is NaN": lambda path: rewritten(path, '"step": 2', '"step": NaN'),
    "a step beyond all numbers": lambda path: rewritten(path, '"step": 2', f'"step": {1 << 63}'),
    "a step of 5000 digits": lambda path: rewritten(path, '"step": 2', f'"step": {"9" * 5000}'),
    "a size below zero": lambda path: rewritten(path, '"size": ', '"size": -'),
    "a size that is NaN": lambda path: rewritten(path, '"size": ', '"size": NaN, "was": '),
    "a size beyond all numbers": lambda path: rewritten(path, '"size": ', f'"size": {1 << 70}'),
    "a file outside": lambda path: rewritten(
        path, '"model.saf', '"../step-000000001-writer-1/model.saf'
    ),
    "a file with foreign digits": lambda path: rewritten(
        path, '"model.saf', '"model-\u0661\u0661\u0661\u0661\u0661-of-00001.saf'
    ),
    "nesting without end": nested,
    "a header longer than the file": lambda path: length(path, (1 << 63) - 1),
    "a header of all numbers": lambda path: length(path, (1 << 64) - 1),
    "a header of a hundred megabytes": lambda path: length(path, 99_000_000),
    "a shape beyond all numbers": lambda path: header(
        path, lambda text: text.replace(b"[3,2]", b"[%d,%d]" % (1 << 62, 1 << 62))
    ),
    "offsets beyond the file": lambda path: header(
        path, lambda text: text.replace(b"[0,24]", b"[0,%d]" % (1 << 62))
    ),
    "offsets that overlap": lambda path: header(
        path, lambda text: text.replace(b"[24,36]", b"[12,24]")
    ),
    "offsets that run backwards": lambda path: header(
        path, lambda text: text.replace(b"[0,24]", b"[24,0]")
    ),
    "a header nested without end": lambda path: header(
        path, lambda text: b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}"
    ),
}
SEEN_ONLY_BY_READING = {
    "a model of another step",
    "a model and its index of another step",
    "two files of equal shapes changed places",
}
"""These have the recorded sizes: only who reads all bytes finds them."""


@pytest.fixture
def run(tmp_path: Path) -> Path:
    for step in (1, 2):
        save(tmp_path, checkpoint(step))
    return tmp_path


@pytest.mark.parametrize("name", DAMAGES)
@pytest.mark.timeout(30)
def test_it_is_passed_over_aloud_in_little_memory(run: Path, name: str) -> None:
    path = list_checkpoints(run)[-1]
    DAMAGES[name](path)
    said: list[str] = []
    tracemalloc.start()
    found = latest(run, lambda where, why: said.append(f"{where.name}: {why}"))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert found is not None
    assert_same(found, checkpoint(1))
    assert len(said) == 1
    assert said[0].startswith("step-000000002-writer-2: ")
    assert peak < MEMORY


@pytest.mark.parametrize("name", DAMAGES)
@pytest.mark.timeout(30)
def test_every_reader_and_command_says_one_clear_error(
    run: Path, name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = list_checkpoints(run)[-1]
    DAMAGES[name](path)
    for read in (load, verify):
        with pytest.raises(CheckpointError, match=r"step-000000002"):
            read(path)
    seen = name not in SEEN_ONLY_BY_READING
    if seen:
        with pytest.raises(CheckpointError, match=r"step-000000002"):
            describe(path)
    for action in ("verify", "export", *(["show"] if seen else [])):
        output = ("--output", str(run / "out")) if action == "export" else ()
        assert main(["checkpoint", action, str(run), *output]) == 1
        said = capsys.readouterr()
        assert said.out == ""
        assert said.err.startswith("trireme: error: ")
        assert len(said.err.splitlines()) == 1
    assert main(["checkpoint", "ls", str(run)]) == seen
    listed = capsys.readouterr().out.splitlines()
    assert len(listed) == 2
    assert listed[1].startswith("step-000000002-writer-2  DAMAGED: ") == seen


def test_a_link_to_the_right_bytes_is_no_damage(run: Path, tmp_path: Path) -> None:
    path = list_checkpoints(run)[-1]
    for file in list(path.iterdir()):
        kept = tmp_path / f"kept-{file.name}"
        file.rename(kept)
        file.symlink_to(kept)
    assert_same(load(path), checkpoint(2))


def test_files_that_the_state_does_not_name_are_no_part_of_it(run: Path) -> None:
    path = list_checkpoints(run)[-1]
    save_file({"fc.weight": torch.zeros(3, 2)}, path / "model-00001-of-00001.safetensors")
    (path / "README.md").write_text("a note")
    assert_same(load(path), checkpoint(2))


@pytest.mark.parametrize(
    "name",
    [
        "step-000000009-copy",
        "step-000000009.bak",
        "step-000000009-writer-",
        "step-0000000009",
        "step-" + 8 * "\u0660" + "\u0669",
        "step-000000009\n",
        "step-99999999999999999999",
    ],
)
def test_only_the_name_of_a_step_is_listed(run: Path, name: str) -> None:
    shutil.copytree(list_checkpoints(run)[-1], run / "checkpoints" / name)
    assert [step_of(path) for path in list_checkpoints(run)] == [1, 2]


def test_a_checkpoint_may_be_moved_under_another_name(run: Path) -> None:
    moved = list_checkpoints(run)[-1].rename(run / "best")
    assert_same(load(moved), checkpoint(2))


def test_what_is_replaced_while_it_is_read_is_no_mixture(
    run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same step, saved anew between two files: no file of either is taken for the other's."""
    from trireme.session.checkpoint import format as module

    path, original = list_checkpoints(run)[-1], module.read_tensors

    def read_tensors(*given: object) -> object:
        found = original(*given)  # type: ignore[arg-type]
        save(run, replace(checkpoint(8), step=2), writer=2)
        return found

    monkeypatch.setattr(module, "read_tensors", read_tensors)
    with pytest.raises(CheckpointError, match="was replaced by another checkpoint while"):
        load(path)


@pytest.mark.parametrize("step", [-1, 1 << 63])
def test_no_step_is_saved_that_could_not_be_read(tmp_path: Path, step: int) -> None:
    with pytest.raises(CheckpointError, match="cannot be saved"):
        save(tmp_path, CheckpointData(step, {}))


def test_no_name_is_saved_that_could_not_be_read(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="rename it"):
        save(tmp_path, CheckpointData(1, {"\ud800": torch.zeros(1)}))


def test_a_number_in_the_state_is_read_back_exactly(tmp_path: Path) -> None:
    state = {"nan": float("nan"), "huge": 10**400, "below": -0.0}
    found = load(save(tmp_path, CheckpointData(1, {}, state=state)))
    assert json.dumps(found.state) == json.dumps(state)

"""Damaged checkpoints, read by everything that reads them.

Half of the cases are accidents: bytes that change, files that are cut, lost, mixed up or are no
files any more. Checksums find all of them: what is loaded is, to the last bit, a checkpoint
that was saved. The other half are forgeries, whose checksums are right: state, index or header
are changed as somebody would who also knows about checksums. They are refused, or mean
something: what is loaded can be saved and loaded again, and is the same.
"""

from __future__ import annotations

import io
import json
import os
import random
import shutil
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from tests.fuzz.damage import damaged_bytes, damaged_value
from tests.session.checkpoint.samples import (
    assert_same,
    assert_same_tensors,
    sample,
    seal,
    write_with_checksums,
)
from trireme.cli import main
from trireme.cli.command import COMMANDS
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

STATE = "state.json"
MEMORY = Path("/dev/shm")
"""Where to write, if it is there: what is damaged need not reach a disk."""


def example(number: int) -> CheckpointData:
    """Returns a checkpoint with every group and many types; its values follow from the number."""
    generator = torch.Generator().manual_seed(number)
    data = sample(number, width=3)
    model = {
        **data.model,
        "odd/name \u4e2d": torch.randint(0, 255, (5,), generator=generator, dtype=torch.uint8),
        "half": torch.randn(2, 2, generator=generator).to(torch.bfloat16),
        "empty": torch.empty(0, 3),
        "flag": torch.tensor(number % 2 == 0),
    }
    local = {f"{worker}/fc.weight/step": torch.tensor(float(number)) for worker in range(2)}
    average = {name: tensor / 2 for name, tensor in data.model.items()}
    state = {**data.state, "number": number, "nan": float("nan"), "deep": [{"x": [None, True]}]}
    return CheckpointData(number, model, data.optimizer, average, state, local)


class CheckpointFuzzer:
    """Damages copies of saved checkpoints.

    Args:
        directory: where; everything in it is this fuzzer's.
    """

    def __init__(self, directory: Path) -> None:
        self._originals: list[Path] = []
        self._saved = {number: example(number) for number in (1, 2, 3)}
        for number, data in self._saved.items():
            shard_bytes = 60 if number == 2 else 1 << 30
            self._originals.append(save(directory / "good", data, shard_bytes=shard_bytes))
        self._run = directory / "run"
        self._again = directory / "again"

    def run_case(self, draw: random.Random) -> str:
        """Damages the newest of two checkpoints and has both read; returns how it ended."""
        old, new = draw.sample(self._originals, 2)
        old, new = sorted((old, new), key=lambda path: path.name)
        checkpoints = self._run / "checkpoints"
        shutil.rmtree(self._run, ignore_errors=True)
        for path in (old, new):
            shutil.copytree(path, checkpoints / path.name, copy_function=shutil.copyfile)
        path = checkpoints / new.name
        forged = draw.random() < 0.5
        what = self._forge(path, draw) if forged else self._damage(path, draw)
        ended = self._read(path, forged=forged)
        self._read_newest(old, path, ended)
        if draw.random() < 0.1:
            self._command(ended, draw)
        return f"{what}: {ended}"

    # What is done to it ------------------------------------------------------------------------

    def _damage(self, path: Path, draw: random.Random) -> str:
        files = sorted(path.iterdir())
        if draw.random() < 0.6:
            for file in draw.sample(files, draw.choice((1, 1, 1, 2))):
                content = file.read_bytes()
                changed = damaged_bytes(content, draw)
                file.write_bytes(changed if draw.random() < 0.8 else _cut(content, draw))
            return "bytes"
        file, other = draw.sample(files, 2)
        foreign = draw.choice(self._originals)
        ways: dict[str, Callable[[], object]] = {
            "lost": file.unlink,
            "swapped": lambda: _swap(file, other),
            "of another step": lambda: _mix(path, foreign, draw),
            "no file": lambda: _replace(file, draw),
            "emptied": lambda: os.truncate(file, 0),
            "enlarged": lambda: os.truncate(file, draw.choice((10_000, 1 << 33, 1 << 40))),
            "beside others": lambda: shutil.copyfile(file, path / draw.choice(_BESIDE)),
            "renamed": lambda: file.rename(path / draw.choice((*_BESIDE, other.name))),
        }
        name = draw.choice(list(ways))
        ways[name]()
        return name

    def _forge(self, path: Path, draw: random.Random) -> str:
        names = sorted(file.name for file in path.iterdir())
        state = json.loads((path / STATE).read_bytes())
        del state["checksum"]
        if draw.random() < 0.4:
            for _ in range(draw.choice((1, 1, 2))):
                state = damaged_value(state, draw, binary=False)
            _write_state(path, _text(state, draw))
            return "forged state"
        name = draw.choice([name for name in names if name != STATE])
        content = (path / name).read_bytes()
        if draw.random() < 0.3:
            write_with_checksums(path, name, damaged_bytes(content, draw))
            return "forged bytes"
        if name.endswith(".json"):
            changed = _text(damaged_value(json.loads(content), draw, binary=False), draw)
            write_with_checksums(path, name, changed)
            return "forged index"
        size = int.from_bytes(content[:8], "little")
        header = damaged_value(json.loads(content[8 : 8 + size]), draw, binary=False)
        text = _text(header, draw)
        told = draw.choice((len(text), len(text), len(text), size, (1 << 63) - 1, 1 << 26))
        whole = told.to_bytes(8, "little") + text + content[8 + size :]
        write_with_checksums(path, name, whole)
        return "forged header"

    # What reads it -------------------------------------------------------------------------------

    def _read(self, path: Path, *, forged: bool) -> str:
        """Returns whether it was `loaded` or `refused`; checks what was loaded."""
        try:
            data = load(path)
        except CheckpointError as error:
            assert str(path) in str(error), f"which one? {error}"
            assert len(str(error)) < 4000
            for read in (verify, describe):
                try:
                    read(path)
                except CheckpointError as other:
                    assert str(path) in str(other), f"which one? {other}"
                else:  # verify reads no values, and describe not all bytes
                    assert forged or read is describe, "verify did not find what load found"
            return "refused"
        verify(path)
        described, dtypes_and_shapes = describe(path)
        assert described.step == data.step
        assert step_of(path) == data.step, "it is of another step than its name says"
        for group in ("model", "optimizer", "average", "local"):
            shapes = {name: tuple(t.shape) for name, t in getattr(data, group).items()}
            found = dtypes_and_shapes.get(group, {})
            assert {name: shape for name, (_, shape) in found.items()} == shapes
        if forged:
            self._save_again(data)
        else:
            assert data.step in self._saved, "this was never saved"
            assert_same(data, self._saved[data.step])
            assert_same_tensors(data.local, self._saved[data.step].local)
        return "loaded"

    def _save_again(self, data: CheckpointData) -> None:
        shutil.rmtree(self._again, ignore_errors=True)
        found = load(save(self._again, data))
        assert_same(found, data)
        assert_same_tensors(found.local, data.local)

    def _read_newest(self, old: Path, path: Path, ended: str) -> None:
        """Checks that the older one is taken, aloud, where the newer one is refused."""
        passed: list[Path] = []
        found = latest(self._run, lambda where, why: passed.append(where))
        assert found is not None
        assert passed == ([path] if ended == "refused" else [])
        if ended == "refused":
            expected = next(d for d in self._saved.values() if step_of(old) == d.step)
            assert_same(found, expected)

    def _command(self, ended: str, draw: random.Random) -> None:
        """Checks that a command ends with one line, and no traceback, whatever is there."""
        action = draw.choice(("ls", "show", "verify", "export"))
        if "checkpoint" not in COMMANDS:
            return
        words = ["checkpoint", action, str(self._run)]
        if action == "export":
            words += ["--output", str(self._run / "exported.safetensors")]
        out, err = io.StringIO(), io.StringIO()
        with redirect_stdout(out), redirect_stderr(err), mock.patch("os.fsync"):
            status = main(words)
        if status and action != "ls":
            assert status == 1
            assert err.getvalue().startswith("trireme: error: ")
            assert len(err.getvalue().splitlines()) == 1
        elif action in ("verify", "export"):
            assert ended == "loaded" or action == "verify"
        assert len(list_checkpoints(self._run)) == 2


_BESIDE = ("model-00001-of-00002.safetensors", "notes.txt", "model.safetensors.bak", ".hidden")


def _cut(content: bytes, draw: random.Random) -> bytes:
    place = draw.randrange(len(content) + 1)
    return content[:place] + (bytes(len(content) - place) if draw.random() < 0.5 else b"")


def _swap(one: Path, other: Path) -> None:
    content = one.read_bytes()
    one.write_bytes(other.read_bytes())
    other.write_bytes(content)


def _mix(path: Path, foreign: Path, draw: random.Random) -> None:
    files = sorted(foreign.iterdir())
    for file in draw.sample(files, draw.choice((1, 2, len(files)))):
        shutil.copyfile(file, path / file.name)


def _replace(file: Path, draw: random.Random) -> None:
    file.unlink()
    kind = draw.randrange(4)
    if kind == 0:
        file.mkdir()
    elif kind == 1:
        os.mkfifo(file)
    else:
        file.symlink_to(draw.choice(("/dev/zero", "nowhere", file.name, "/", "/etc/hostname")))


def _text(value: Any, draw: random.Random) -> bytes:
    """Returns JSON, in which now and then a name is there twice."""
    text = json.dumps(value)
    if text.startswith("{") and len(text) > 2 and draw.random() < 0.1:
        text = "{" + text[1:-1] + ", " + text[1:]
    return text.encode("utf-8", "surrogatepass")


def _write_state(path: Path, text: bytes) -> None:
    body = text[:-1] + b",\n" if text.endswith(b"}") and len(text) > 2 else text
    (path / STATE).write_bytes(seal(body))

"""Functions on their way to workers, and what they return: without the processes."""

from __future__ import annotations

import functools
import json
import os
import sys
import threading
from pathlib import Path
from typing import IO, Any

import pytest
import torch
from torch import nn

from trireme.errors import ConfigurationError
from trireme.jobs.function import call, function_name, pack_call, read_result
from trireme.launch.config.secret import nameless_file
from trireme.launch.config.task_config import GroupMember, TaskConfig
from trireme.launch.exit_reason import LauncherPipe
from trireme.launch.process_setup.program import run_body


def called(function: Any, *args: Any, result: IO[bytes], index: int = 0, **task: Any) -> int:
    """Has a worker call a function, as in its own process, and returns the exit status."""
    with pack_call(function, args) as file:
        fds = {"call": os.dup(file.fileno()), "result": os.dup(result.fileno())}
        config = TaskConfig(job="j", index=index, descriptors=fds, **task)
        return run_body(functools.partial(call, config))


@pytest.fixture
def result() -> IO[bytes]:
    return nameless_file("result")


def test_a_closure_with_a_module_comes_and_its_result_goes_back(result: IO[bytes]) -> None:
    model, scale = nn.Linear(3, 2), 2.0

    def train(inputs: torch.Tensor, *, bias: float = 1.0) -> dict[str, Any]:
        return {"out": model(inputs) * scale + bias, "state": model.state_dict()}

    inputs = torch.ones(1, 3)
    assert called(functools.partial(train, bias=3.0), inputs, result=result) == 0
    returned: Any = read_result(result)
    assert torch.equal(returned["out"], model(inputs) * scale + 3.0)
    assert torch.equal(returned["state"]["weight"], model.weight)


def test_an_engine_that_passes_no_descriptors_is_named() -> None:
    with open(
        os.devnull, "rb"
    ) as another:  # what has the number in a process that inherits nothing
        task = TaskConfig(job="j", descriptors={"call": os.dup(another.fileno())})
        with pytest.raises(ConfigurationError, match="the engine local must pass on the descr"):
            call(task)


def test_a_function_that_returns_nothing_returns_none(result: IO[bytes]) -> None:
    assert read_result(result) is None  # no worker has come so far
    assert called(lambda: None, result=result) == 0
    assert read_result(result) is None


def test_the_result_of_the_lowest_worker_stays(result: IO[bytes]) -> None:
    for index in (2, 1, 3):
        assert called(lambda value: value, "x" * (10 - index), result=result, index=index) == 0
    assert read_result(result) == "x" * 9


def test_a_worker_that_is_started_again_replaces_its_result(result: IO[bytes]) -> None:
    assert called(lambda: list(range(1000)), result=result) == 0
    assert called(lambda: "again", result=result) == 0
    assert read_result(result) == "again"


def test_only_the_first_process_of_a_worker_returns_a_result(result: IO[bytes]) -> None:
    assert called(lambda: "part", result=result, servers=1, group=GroupMember(size=2, rank=1)) == 0
    assert read_result(result) is None


def test_the_status_is_what_the_function_exits_with(result: IO[bytes]) -> None:
    assert called(lambda: sys.exit(7), result=result) == 7
    assert called(lambda: sys.exit(), result=result) == 0
    assert read_result(result) is None


def test_an_exception_is_reported_with_its_traceback_and_source(
    result: IO[bytes], capsys: pytest.CaptureFixture[str]
) -> None:
    def fails() -> None:
        raise ValueError("boom")

    reader, writer = os.pipe()
    with pack_call(fails, ()) as file:
        task = TaskConfig(job="j", descriptors={"call": os.dup(file.fileno())})
        assert run_body(functools.partial(call, task), launcher=LauncherPipe(writer)) == 1
    with os.fdopen(reader, "rb", buffering=0) as pipe:
        reason = json.loads(pipe.read(1 << 16).splitlines()[0])
    assert reason["summary"].startswith("ValueError: boom (test_function.py:")
    assert 'raise ValueError("boom")' in reason["traceback"]
    assert "trireme/" not in reason["traceback"]
    assert reason["traceback"] == capsys.readouterr().err


def test_the_code_of_a_cell_comes_along_for_tracebacks(
    result: IO[bytes], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import linecache

    text = "def cell():\n    raise ValueError('from a cell')\n"
    names: dict[str, Any] = {"__name__": "__main__"}
    monkeypatch.setitem(linecache.cache, "<cell 1>", (len(text), None, text.splitlines(True), ""))
    exec(compile(text, "<cell 1>", "exec"), names)
    with pack_call(names["cell"], ()) as file:
        monkeypatch.delitem(linecache.cache, "<cell 1>")
        task = TaskConfig(job="j", descriptors={"call": os.dup(file.fileno())})
        assert run_body(functools.partial(call, task)) == 1
    assert "raise ValueError('from a cell')" in capsys.readouterr().err


def test_the_path_of_modules_comes_along(
    result: IO[bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "beside_the_notebook.py").write_text("def answer():\n    return 42\n")
    monkeypatch.syspath_prepend(tmp_path)
    import beside_the_notebook

    file = pack_call(beside_the_notebook.answer, ())
    monkeypatch.setattr(sys, "path", [each for each in sys.path if each != str(tmp_path)])
    monkeypatch.delitem(sys.modules, "beside_the_notebook")
    fds = {"call": os.dup(file.fileno()), "result": os.dup(result.fileno())}
    task = TaskConfig(job="j", descriptors=fds)
    assert run_body(functools.partial(call, task)) == 0
    assert read_result(result) == 42


@pytest.mark.parametrize("value", [threading.Lock(), (each for each in "ab")])
def test_what_cannot_travel_is_an_error_that_says_so(value: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"train cannot be sent .* inside the function"):
        pack_train(value)


def pack_train(value: Any) -> IO[bytes]:
    def train() -> Any:
        return value

    return pack_call(train, ())


def test_a_result_that_cannot_travel_fails_the_worker(
    result: IO[bytes], capsys: pytest.CaptureFixture[str]
) -> None:
    assert called(threading.Lock, result=result) == 2
    assert "what worker:0 returned cannot be sent back" in capsys.readouterr().err


def test_without_cloudpickle_the_message_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "cloudpickle", None)
    with pytest.raises(ConfigurationError, match=r"pip install 'trireme-train\[notebook\]'"):
        pack_call(print, ())


@pytest.mark.parametrize(
    ("function", "name"),
    [
        (lambda: None, "lambda"),
        (functools.partial(pack_train, 1), "pack-train"),
        (nn.Linear(1, 1), "Linear"),
    ],
)
def test_the_run_directory_is_called_after_the_function(function: Any, name: str) -> None:
    assert function_name(function) == name

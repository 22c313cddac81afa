from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import nn

import trireme
from trireme.session.hooks import Hook


def test_a_hook_does_nothing_unless_told() -> None:
    names = [name for name, _ in inspect.getmembers(Hook, inspect.isfunction) if name[0] != "_"]
    assert names == [
        "after_step",
        "before_step",
        "on_checkpoint",
        "on_evaluate",
        "on_fail",
        "on_start",
        "on_stop",
    ]
    for name in names:
        method = getattr(Hook(), name)
        assert method(*inspect.signature(method).parameters) is None


class Recording(Hook):
    """Notes what it is told of the end."""

    def __init__(self) -> None:
        self.told: list[str] = []

    def on_stop(self, session: Any, reason: str) -> None:
        self.told.append(reason)

    def on_fail(self, session: Any, error: BaseException) -> None:
        self.told.append(repr(error))
        raise OSError("the tracker is away")


def end(error: BaseException | None) -> tuple[list[str], BaseException | None]:
    """What a hook is told where a session's block ends in this way, and what comes out."""
    hook = Recording()
    model = nn.Linear(2, 1)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1)
    try:
        with trireme.Session(model, nn.MSELoss(), sgd, hooks=[hook]) as session:
            session.step((torch.ones(2, 2), torch.ones(2, 1)))
            if error is not None:
                raise error
    except BaseException as raised:
        return hook.told, raised
    return hook.told, None


def test_a_hook_is_told_of_a_failure_and_cannot_hide_it() -> None:
    error = ValueError("bad data")
    told, raised = end(error)
    assert told == ["ValueError('bad data')"] and raised is error
    assert error.__notes__ == ["Recording.on_fail raised OSError('the tracker is away')"]
    assert end(KeyboardInterrupt())[0] == ["KeyboardInterrupt()"]
    assert end(None) == (["finished"], None)

"""Where a node of a captured graph, or an error of a capture, comes from in the program."""

from __future__ import annotations

import inspect
import os
import re
import traceback
from collections.abc import Iterable
from types import FrameType
from typing import Any

import torch
from torch import fx, nn

_FRAME = re.compile(r'File "([^"]+)", line (\d+), in ')
_TORCH = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep
_HERE = os.path.dirname(os.path.abspath(__file__)) + os.sep


def source_line(node: fx.Node) -> str:
    """Returns the line that a node comes from, as `file:line`; "" if torch made it without one.

    It is the innermost line outside torch, else (`nn.Sequential` calls layers without a line of the
    user's) the innermost line of torch.
    """
    noted: str | None = node.meta.get("custom", {}).get("line")
    if noted is not None:
        return noted
    lines = _FRAME.findall(node.meta.get("stack_trace") or "")
    return _innermost(lines) or (":".join(lines[-1]) if lines else "")


def calling_line(frame: FrameType | None) -> str:
    """Returns the innermost line outside torch of a stack inside a capture."""
    while frame is not None and not frame.f_code.co_filename.startswith(_HERE):
        if _is_users(frame.f_code.co_filename):
            return f"{frame.f_code.co_filename}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


def error_line(error: BaseException, model: nn.Module) -> str:
    """Returns the user's line that caused an error of a capture.

    It is the innermost line outside torch of the error's traceback, else of a traceback in its
    message, else the first line of the model's `forward`; "" if that has no file.
    """
    raised = [
        (frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(error.__traceback__)
    ]
    # The traceback begins with the caller of the capture, which is not the cause.
    first = next((i for i, (file, _) in enumerate(raised) if file.startswith(_HERE)), 0)
    found = _innermost(raised[first:]) or _innermost(_FRAME.findall(str(error)))
    return found or forward_line(model)


def forward_line(model: nn.Module) -> str:
    """Returns the first line of a model's `forward`; "" if it has no file, or is torch's."""
    try:
        file = inspect.getsourcefile(type(model).forward)
        _, line = inspect.getsourcelines(type(model).forward)
    except (OSError, TypeError):
        return ""
    return f"{file}:{line}" if file and _is_users(file) else ""


def scope(node: fx.Node) -> str:
    """Returns the name of the innermost module that a node belongs to; "" is the model itself."""
    stack = node.meta.get("nn_module_stack") or {}
    path = str(list(stack.values())[-1][0]) if stack else ""
    if path.startswith("_empty_nn_module_stack"):  # torch's name of a scope where it knows none
        return ""
    # A module that is called several times has a number behind its name from the second call on.
    return re.sub(r"@\d+", "", path)


def _innermost(lines: Iterable[tuple[str, Any]]) -> str:
    users = [f"{file}:{line}" for file, line in lines if _is_users(file)]
    return users[-1] if users else ""


def _is_users(file: str) -> bool:
    return not file.startswith((_TORCH, _HERE, "<"))

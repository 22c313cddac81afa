"""Where a node of a captured graph, or an error of a capture, comes from in the program."""

from __future__ import annotations

import inspect
import os
import re
import traceback
from collections.abc import Iterator
from dataclasses import dataclass
from types import FrameType

import torch
from torch import fx, nn

_FRAME = re.compile(r'File "([^"]+)", line (\d+), in ')
_TORCH = os.path.dirname(os.path.abspath(torch.__file__)) + os.sep
_HERE = os.path.dirname(os.path.abspath(__file__)) + os.sep


@dataclass(frozen=True, slots=True)
class SourceLine:
    """A line of a program."""

    file: str  # the path of the file
    line: int  # the number of the line, from 1

    def __str__(self) -> str:
        return f"{self.file}:{self.line}"


def source_line(node: fx.Node) -> SourceLine | None:
    """Returns the line that a node comes from; None if torch made the node without one.

    It is the innermost line outside torch, else (`nn.Sequential` calls layers without a line of the
    user's) the innermost line of torch.
    """
    noted: SourceLine | None = node.meta.get("custom", {}).get("line")
    if noted is not None:
        return noted
    lines = [SourceLine(*each) for each in _frames(node.meta.get("stack_trace") or "")]
    return next((each for each in reversed(lines) if _is_users(each.file)), None) or (
        lines[-1] if lines else None
    )


def calling_line(frame: FrameType | None) -> SourceLine | None:
    """Returns the innermost line outside torch of a stack inside a capture; None without one."""
    while frame is not None and not frame.f_code.co_filename.startswith(_HERE):
        if _is_users(frame.f_code.co_filename):
            return SourceLine(frame.f_code.co_filename, frame.f_lineno)
        frame = frame.f_back
    return None


def error_line(error: BaseException, model: nn.Module) -> SourceLine | None:
    """Returns the user's line that caused an error of a capture.

    It is the innermost line outside torch of the error's traceback, else of a traceback in its
    message, else the first line of the model's `forward`; None if that has no file.
    """
    raised = [
        SourceLine(frame.f_code.co_filename, line)
        for frame, line in traceback.walk_tb(error.__traceback__)
    ]
    # The traceback begins with the caller of the capture, which is not the cause.
    inside = [i for i, each in enumerate(raised) if each.file.startswith(_HERE)]
    raised = raised[inside[0] :] if inside else raised
    said = [SourceLine(*each) for each in _frames(str(error))]
    for lines in (raised, said):
        for each in reversed(lines):
            if _is_users(each.file):
                return each
    return forward_line(model)


def error_module(error: BaseException, model: nn.Module) -> str:
    """Returns the class and path of a layer of torch in whose code an error arose.

    Returns "" if the code is the program's own, or if it is none of a module.
    """
    paths = {id(module): path for path, module in model.named_modules()}
    found = ""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        owner = frame.f_locals.get("self")
        if isinstance(owner, nn.Module) and paths.get(id(owner)):
            file = frame.f_code.co_filename
            inside = not _is_users(file) and frame.f_code.co_name == "forward"
            found = f"{type(owner).__name__} {paths[id(owner)]}" if inside else ""
    return found


def forward_line(model: nn.Module) -> SourceLine | None:
    """Returns the first line of a model's `forward`; None if it has no file, or is torch's."""
    try:
        file = inspect.getsourcefile(type(model).forward)
        _, line = inspect.getsourcelines(type(model).forward)
    except (OSError, TypeError):
        return None
    return SourceLine(file, line) if file and _is_users(file) else None


def scope(node: fx.Node) -> str:
    """Returns the name of the innermost module that a node belongs to; "" is the model itself."""
    stack = node.meta.get("nn_module_stack") or {}
    path = str(list(stack.values())[-1][0]) if stack else ""
    # A module that is called several times has a number behind its name from the second call on.
    return re.sub(r"@\d+", "", path)


def _frames(text: str) -> Iterator[tuple[str, int]]:
    for file, line in _FRAME.findall(text):
        yield file, int(line)


def _is_users(file: str) -> bool:
    return not file.startswith((_TORCH, _HERE, "<"))

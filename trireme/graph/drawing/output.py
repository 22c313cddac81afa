"""Writes the pictures that `trireme graph` asks for."""

from __future__ import annotations

import os
from pathlib import Path

from trireme.errors import ConfigurationError
from trireme.graph.drawing.page import page
from trireme.graph.drawing.picture import Picture
from trireme.graph.drawing.svg import element, svg
from trireme.graph.drawing.text import text
from trireme.launch.config.task_config import DrawRequest


def write(picture: Picture, request: DrawRequest) -> str:
    """Writes the files of a request, and returns the text to print.

    The page has the drawing in it where Graphviz is installed, and a note in the text where not.
    """
    parts = [text(picture)]
    if request.svg is not None:
        parts.append(_written(request.svg, svg(picture)))
    if request.html is not None:
        drawing, note = "", ""
        try:
            drawing = element(svg(picture, legend=False))
        except ConfigurationError as error:
            note = f"\nthe page has no drawing: {error}"
        parts.append(_written(request.html, page(picture, drawing)) + note)
    return "\n\n".join(parts)


def check_files(request: DrawRequest) -> None:
    """Checks, before anything is computed, that the files of a request can probably be written."""
    for name in filter(None, (request.svg, request.html)):
        path = Path(name)
        if path.is_dir():
            raise _refusal(name, "it is a directory")
        there = next(each for each in path.absolute().parents if each.exists())
        if not there.is_dir() or not os.access(there, os.W_OK):
            raise _refusal(name, f"nothing can be written in {there}")


def _refusal(name: str, why: str) -> ConfigurationError:
    return ConfigurationError(
        f"the picture {name} cannot be written: {why}. Name a file in a directory that you may "
        "write to"
    )


def _written(name: str, content: str) -> str:
    path = Path(name)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content, encoding="utf-8")
    except OSError as error:
        raise _refusal(name, error.strerror or str(error)) from error
    return f"wrote {name}"

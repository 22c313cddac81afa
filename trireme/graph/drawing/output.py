"""Writes the pictures that `trireme graph` asks for."""

from __future__ import annotations

from pathlib import Path

from trireme.draw_request import DrawRequest
from trireme.errors import ConfigurationError
from trireme.graph.drawing.page import page
from trireme.graph.drawing.picture import Picture
from trireme.graph.drawing.svg import element, svg
from trireme.graph.drawing.text import text


def write(picture: Picture, request: DrawRequest) -> str:
    """Writes the files of a request, and returns the text to print.

    The page has the drawing in it where Graphviz is installed, and a note in the text where not.

    Raises:
        ConfigurationError: Graphviz is missing and a drawing is asked for, or a file cannot be
            written.
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


def _written(name: str, content: str) -> str:
    """Writes a file and returns a line that says so."""
    path = Path(name)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content, encoding="utf-8")
    except OSError as error:
        raise ConfigurationError(
            f"the picture {name} cannot be written: {error.strerror or error}. Name a file in a "
            "directory that you may write to"
        ) from error
    return f"wrote {name}"

"""What the site needs beside Sphinx's own extensions (docs/conf.py)."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

from site_pages import CHILDREN
from sphinx.application import Sphinx

START = """<!doctype html>
<meta charset="utf-8">
<title>Trireme</title>
<meta http-equiv="refresh" content="0; url=docs/index.html">
<a href="docs/index.html">Trireme</a>
"""
"""The page at the top of the site: its sources begin at the root of the project."""


CELL = re.compile(
    r"^```\{code-cell\} bash\n(:tags: \[remove-cell\]\n)?(.*?)^```\n", re.DOTALL | re.MULTILINE
)


def change_source(app: Sphinx, docname: str, source: list[str]) -> None:
    """Adds the toctree of a page that lists others; runs no cell of a translation again."""
    if docname.startswith("docs/zh/"):
        source[0] = CELL.sub(lambda cell: "" if cell[1] else f"```sh\n{cell[2]}```\n", source[0])
    if patterns := CHILDREN.get(docname):
        listed = "\n".join(patterns)
        source[0] += f"\n```{{toctree}}\n:hidden:\n:glob:\n\n{listed}\n```\n"


def write_start(app: Sphinx, error: Exception | None) -> None:
    """Writes the page at the top of the site."""
    if error is None and app.builder.format == "html":
        (Path(app.outdir) / "index.html").write_text(START, encoding="utf-8")


def is_not_an_empty_glob(record: logging.LogRecord) -> bool:
    """Returns whether a message is about something else than a section without pages yet."""
    return "didn't match any documents" not in record.getMessage()


def setup(app: Sphinx) -> dict[str, Any]:
    """Connects to Sphinx's events."""
    app.connect("source-read", change_source)
    app.connect("build-finished", write_start)
    logging.getLogger("sphinx.sphinx.directives.other").addFilter(is_not_an_empty_glob)
    return {"parallel_read_safe": True, "parallel_write_safe": True}

"""What the site needs beside Sphinx's own extensions (docs/conf.py)."""

from __future__ import annotations

import logging
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


def add_children(app: Sphinx, docname: str, source: list[str]) -> None:
    """Adds the toctree of a page that lists other pages."""
    if pattern := CHILDREN.get(docname):
        source[0] += f"\n```{{toctree}}\n:hidden:\n:glob:\n\n{pattern}\n```\n"


def write_start(app: Sphinx, error: Exception | None) -> None:
    """Writes the page at the top of the site."""
    if error is None and app.builder.format == "html":
        (Path(app.outdir) / "index.html").write_text(START, encoding="utf-8")


def is_not_an_empty_glob(record: logging.LogRecord) -> bool:
    """Returns whether a message is about something else than a section without pages yet."""
    return "didn't match any documents" not in record.getMessage()


def setup(app: Sphinx) -> dict[str, Any]:
    """Connects to Sphinx's events."""
    app.connect("source-read", add_children)
    app.connect("build-finished", write_start)
    logging.getLogger("sphinx.sphinx.directives.other").addFilter(is_not_an_empty_glob)
    return {"parallel_read_safe": True, "parallel_write_safe": True}

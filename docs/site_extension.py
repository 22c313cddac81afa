"""What the site needs beside Sphinx's own extensions (docs/conf.py)."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

import translations
from site_pages import CHILDREN
from site_search import SearchEnglishAndChinese
from sphinx.application import Sphinx

START = """<!doctype html>
<meta charset="utf-8">
<title>Trireme</title>
<meta http-equiv="refresh" content="0; url=docs/index.html">
<a href="docs/index.html">Trireme</a>
"""
"""The page at the top of the site: its sources begin at the root of the project."""

OLDER = """:::{admonition} 本页译文较旧
:class: warning

英文原文已有更新，本页尚未跟上。两者不一致时，以英文原文为准。
:::
"""
"""The note of a translated page that is older than its original."""
CAPTION = re.compile(r'(?=<p class="caption")')
CHINESE = ">中文<"
"""What begins a section at the side of a page, and how the Chinese section is called."""

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


def warn_of_age(app: Sphinx, docname: str, source: list[str]) -> None:
    """Adds a note below the title of a translated page that is older than its original."""
    page = translations.ROOT / f"{docname}.md"
    stamp = translations.STAMP.match(source[0])
    if stamp is None:
        return
    app.env.note_dependency(str(translations.ROOT / stamp[1]))  # read again if that changes
    if any(translations.older([page])):
        source[0] = re.sub(r"^# .*\n", rf"\g<0>\n{OLDER}", source[0], count=1, flags=re.MULTILINE)


def tell_language(
    app: Sphinx, docname: str, template: str, context: dict[str, Any], doctree: object
) -> None:
    """Says that a translated page is Chinese, and has the Chinese pages first at its side."""
    if docname.startswith("docs/zh/"):
        context["language"] = "zh-CN"  # browsers choose the fonts by it
        begin, *sections = CAPTION.split(context["furo_navigation_tree"])
        sections.sort(key=lambda section: CHINESE not in section)
        context["furo_navigation_tree"] = "".join([begin, *sections])


def write_start(app: Sphinx, error: Exception | None) -> None:
    """Writes the page at the top of the site."""
    if error is None and app.builder.format == "html":
        (Path(app.outdir) / "index.html").write_text(START, encoding="utf-8")


def is_not_an_empty_glob(record: logging.LogRecord) -> bool:
    """Returns whether a message is about something else than a section without pages yet."""
    return "didn't match any documents" not in record.getMessage()


def setup(app: Sphinx) -> dict[str, Any]:
    """Connects to Sphinx's events."""
    app.add_search_language(SearchEnglishAndChinese)
    app.connect("source-read", change_source)
    app.connect("source-read", warn_of_age)
    app.connect("html-page-context", tell_language, priority=900)  # after the theme
    app.connect("build-finished", write_start)
    logging.getLogger("sphinx.sphinx.directives.other").addFilter(is_not_an_empty_glob)
    return {"parallel_read_safe": True, "parallel_write_safe": True}

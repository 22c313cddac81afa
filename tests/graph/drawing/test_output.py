from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.graph.drawing.samples import picture
from trireme.errors import ConfigurationError
from trireme.graph.drawing.output import write
from trireme.graph.drawing.text import text
from trireme.launch.config.task_config import DrawRequest


def test_text_alone_writes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert write(picture(), DrawRequest()) == text(picture())
    assert not list(tmp_path.iterdir())


def test_the_page_is_written_without_graphviz_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "graphviz", None)
    file = tmp_path / "new" / "graph.html"
    printed = write(picture(), DrawRequest(html=str(file)))
    assert f"wrote {file}\nthe page has no drawing: " in printed
    assert "<svg" not in file.read_text(encoding="utf-8")
    with pytest.raises(ConfigurationError, match="package graphviz"):
        write(picture(), DrawRequest(svg=str(tmp_path / "graph.svg")))


def test_both_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = '<?xml version="1.0"?>\n<svg width="5pt"><!-- a --><g/></svg>\n'
    monkeypatch.setattr("trireme.graph.drawing.output.svg", lambda picture, legend=True: drawn)
    request = DrawRequest(svg=str(tmp_path / "a.svg"), html=str(tmp_path / "b.html"))
    printed = write(picture(), request)
    assert printed.endswith(f"wrote {tmp_path}/a.svg\n\nwrote {tmp_path}/b.html")
    assert (tmp_path / "a.svg").read_text() == drawn
    assert '<svg width="5pt"><g/></svg>' in (tmp_path / "b.html").read_text()


def test_a_file_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigurationError, match=r"file/a\.html cannot be written"):
        write(picture(), DrawRequest(html=str(tmp_path / "file" / "a.html")))

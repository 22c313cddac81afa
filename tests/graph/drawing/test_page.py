from __future__ import annotations

import re
from typing import Any

import html5lib

from tests.graph.drawing.samples import picture, towers
from trireme.graph.drawing.page import page


def parsed(text: str) -> Any:
    parser = html5lib.HTMLParser(strict=True, namespaceHTMLElements=False)
    return parser.parse(text)


def content(element: Any) -> str:
    return " ".join("".join(element.itertext()).split())


def test_it_is_strict_html_that_loads_nothing() -> None:
    text = page(picture(), '<svg width="10pt" height="10pt"><text>drawn</text></svg>')
    parsed(text)
    assert "<text>drawn</text>" in text
    assert not re.search(r"(src|href)=|url\(|@import|<script", text)


def test_it_folds_by_module_with_totals_and_places() -> None:
    tree = parsed(page(picture()))
    heads = {content(each.find("summary/span/b")): each for each in tree.iter("details")}
    assert list(heads) == ["a", "inner", "block", "z"]
    assert heads["inner"] in list(heads["a"].iter("details"))
    assert content(heads["a"].find("summary")) == "aworker:0224" + "2.0 MiB4.0 MiB"
    assert content(heads["block"].find("summary/span")) == "blockworker:0worker:1"
    assert [each.find("span/code").text for each in heads["block"].findall("div")] == [
        "b1",
        "b2",
        "b3",
    ]


def test_it_shows_the_prediction_transfers_segments_algorithms_and_passes() -> None:
    tree = parsed(page(picture()))
    sections = {each.get("id"): each for each in tree.iter("section")}
    assert list(sections) == ["predicted", "modules", "transfers", "segments", "tried", "passes"]
    rows = {
        name: [[content(cell) for cell in row] for row in each.iter("tr")][1:]
        for name, each in sections.items()
    }
    assert rows["transfers"] == [["b1", "worker:0", "worker:1", "returns", "3.0 MiB"]]
    assert rows["segments"] == [
        ["0", "worker:0", "a1", "b1", "3"],
        ["1", "worker:1", "b2", "z1", "3"],
    ]
    assert rows["tried"][-1] == ["single worker:0", "too large", ""]
    assert rows["passes"][0] == ["dead code", "8", "7"]
    assert "40.0 MiB of 100.0 MiB" in content(sections["predicted"])
    bars = [each.get("style") for each in sections["predicted"].iter("i")]
    assert bars == ["width:90.0%", "width:40.0%", "width:30.0%", "width:50.0%"]


def test_a_captured_model() -> None:
    tree = parsed(page(towers()))
    assert content(tree.find("body/header/h1")) == "The graph of Towers"

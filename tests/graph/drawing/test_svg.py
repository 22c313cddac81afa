from __future__ import annotations

import shutil
import sys
from xml.etree import ElementTree

import pytest

from tests.graph.drawing.samples import chain, picture, towers
from trireme.errors import ConfigurationError
from trireme.graph.drawing.picture import Picture
from trireme.graph.drawing.svg import COLOURS, TINTS, element, svg

SVG = "{http://www.w3.org/2000/svg}"


@pytest.fixture
def program() -> None:
    pytest.importorskip("graphviz", reason="no graphviz: pip install 'graphviz>=0.20'")
    if shutil.which("dot") is None:
        pytest.skip("no program dot: apt-get install graphviz")


def groups(drawn: str, kind: str) -> list[ElementTree.Element]:
    root = ElementTree.fromstring(element(drawn))
    return [each for each in root.iter(f"{SVG}g") if (each.get("class") or "").startswith(kind)]


def words(group: ElementTree.Element) -> list[str]:
    return [each.text or "" for each in group.iter(f"{SVG}text")]


@pytest.mark.usefixtures("program")
def test_modules_are_boxes_nodes_have_the_colours_of_places_and_crossing_edges_bytes() -> None:
    drawn = svg(picture())
    assert [words(each)[0] for each in groups(drawn, "cluster")] == ["a", "inner", "block", "z"]
    nodes = {words(each)[0]: each for each in groups(drawn, "node")}
    assert "x" in nodes
    assert "sym_size.int" not in nodes  # each task reads sizes from its inputs
    fills = [each.get("fill") for group in groups(drawn, "node p0") for each in group.iter()]
    assert TINTS[0] in fills
    assert len(groups(drawn, "node p0")) == 4  # three operators and the output
    assert len(groups(drawn, "node p1")) == 3
    (back, forth) = sorted(groups(drawn, "edge crosses"), key=lambda each: each.get("class") or "")
    assert [word.strip() for word in words(back)] == ["3.0 MiB"]
    strokes = [(each.get("stroke"), each.get("stroke-width")) for each in back.iter(f"{SVG}path")]
    assert strokes == [(COLOURS[0], "2.6")]
    assert forth.get("class") == "edge crosses e1"


@pytest.mark.usefixtures("program")
def test_the_legend_names_the_places_unless_it_is_not_wanted() -> None:
    assert ["worker:0", "worker:1"] in [words(each) for each in groups(svg(picture()), "node")]
    assert "worker:1</text>" not in svg(picture(), legend=False)


@pytest.mark.usefixtures("program")
def test_a_captured_model_is_drawn() -> None:
    drawn = svg(towers())
    labels = [words(each)[0] for each in groups(drawn, "node")]
    assert {"linear", "tanh", "loss", "output"} <= set(labels)


@pytest.mark.usefixtures("program")
@pytest.mark.parametrize(
    ("many", "boxes"),
    [
        (chain(400), 400),
        (chain(1000, "layer_{}"), 100),
        (chain(1000, "part.layer_{}"), 100),
    ],
)
def test_of_many_operators_modules_or_runs_are_drawn(many: Picture, boxes: int) -> None:
    drawn = svg(many, legend=False)
    assert len(groups(drawn, "node")) == boxes
    assert len(groups(drawn, "edge")) == boxes - 1
    if boxes == 100:
        assert words(groups(drawn, "node")[0])[1] == "10 operators"
    assert len(groups(drawn, "edge crosses")) == 1


@pytest.mark.usefixtures("program")
def test_odd_names_are_shown_as_they_are() -> None:
    node = picture().nodes[2]
    odd = type(node)("<b>", r"aten.\n&<x>", 'q"<u>', r"\l", "", "worker:<0>")
    drawn = svg(Picture(nodes=(odd,)))
    labels = [words(each) for each in groups(drawn, "node")]
    assert [r"\n&<x>", r"\l"] in labels
    assert ["worker:<0>"] in labels
    assert [words(each) for each in groups(drawn, "cluster")] == [['q"<u>']]


def test_a_missing_package_is_named_with_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "graphviz", None)
    with pytest.raises(ConfigurationError, match=r"package graphviz.*trireme-train\[graph\]"):
        svg(picture())


def test_a_missing_program_is_named_with_what_to_install(
    monkeypatch: pytest.MonkeyPatch, tmp_path
) -> None:
    pytest.importorskip("graphviz")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigurationError, match=r"program `dot` is not on the PATH.*apt-get"):
        svg(picture())

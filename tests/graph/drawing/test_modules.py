from __future__ import annotations

from tests.graph.drawing.samples import operator, picture
from trireme.graph.drawing.modules import Module, Totals, module_places, module_tree, placement_rows


def test_a_module_that_goes_on_later_is_there_once_with_its_totals() -> None:
    nodes = [operator("a", "x", "p"), operator("b", "x.y", "q"), operator("c", "x", "p")]
    (x,) = module_tree(nodes).items
    assert isinstance(x, Module)
    assert [item.name for item in x.items] == ["a", "y", "c"]
    assert (x.totals.operators, x.totals.places) == (3, ("p", "q"))
    assert x.totals.forward_seconds == 0.003


def test_what_each_task_computes_does_not_divide_a_run() -> None:
    nodes = [operator("a", "x", "p"), operator("b", "x", ""), operator("c", "x", "p")]
    nodes.append(operator("d", "x", "q"))
    rows = list(placement_rows(module_tree(nodes)))
    assert [(label, Totals.of(its).places) for label, its in rows] == [
        ("x: a to c", ("p",)),
        ("x: d", ("q",)),
    ]


def test_a_module_is_where_most_of_its_nodes_are() -> None:
    assert module_places(picture().listed) == {
        "": "worker:0",
        "a": "worker:0",
        "a.inner": "worker:0",
        "block": "worker:1",
        "z": "worker:1",
    }

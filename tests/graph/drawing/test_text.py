from __future__ import annotations

from dataclasses import replace

from tests.graph.drawing.samples import chain, operator, picture, towers
from trireme.graph.drawing.text import placement_table, text
from trireme.graph.drawing.words import count, duration, milliseconds, size


def test_the_placement_table_has_a_row_for_each_module_or_run() -> None:
    assert placement_table(picture()).splitlines() == [
        "module or operator  place      operators  forward  backward     held      kept",
        "size                each task          1        0         0      0 B       0 B",
        "a                   worker:0           2        2         4  2.0 MiB   4.0 MiB",
        "block: b1           worker:0           1        1         2  1.0 MiB   2.0 MiB",
        "block: b2 to b3     worker:1           2        2         4  2.0 MiB   4.0 MiB",
        "z                   worker:1           1        1         2  1.0 MiB   2.0 MiB",
        "all                                    7        6        12  6.0 MiB  12.0 MiB",
        "milliseconds of one micro-batch; held: parameters, gradients, optimizer state; kept: "
        "from forward",
        "to backward",
    ]


def test_sections_in_the_order_of_the_work() -> None:
    lines = text(picture()).splitlines()
    heads = [line.partition(":")[0] for line in lines if line and not line.startswith(" ")]
    assert heads == ["captured", "optimised", "placed", "cut", "predicted"]
    words = "\n".join(" ".join(line.split()) for line in lines)
    assert "captured: 8 operators of Net" in words
    assert "dead code 8 -> 7" in words
    assert "without aten.relu" in words
    assert "placed: 7 operators on 2 places" in words
    assert "cut: 2 segments, 1 transfer forward for each micro-batch" in words
    assert "depth 1 worker:1 3 b2 z1" in words
    assert "b1 worker:0 worker:1 3.0 MiB returns" in words
    assert "predicted: 20 ms a step of 2 micro-batches" in words
    assert "worker:0 18 ms 90% 40.0 MiB 100.0 MiB" in words
    assert "worker:1 6 ms 30% 20.0 MiB none" in words
    assert "random 30 ms x 1.50\nsingle worker:0 too large" in words


def test_the_late_segment_of_a_place_has_a_row_after_the_early_one() -> None:
    drawn = picture()
    nodes = tuple(replace(node, late=node.name == "a2") for node in drawn.nodes)
    words = [" ".join(line.split()) for line in text(replace(drawn, nodes=nodes)).splitlines()]
    first = words.index("depth 0 worker:0 2 a1 b1")
    assert words[first + 1 : first + 3] == [
        "depth 0, late worker:0 1 a2 a2",
        "depth 1 worker:1 3 b2 z1",
    ]


def test_no_line_is_longer_than_a_hundred_characters() -> None:
    deep = ".".join(f"a_module_with_a_long_name_{i}" for i in range(5))
    nodes = tuple(
        operator(f"scaled_dot_product_attention_{i}", deep, f"worker:{i % 2}/cuda:{i}")
        for i in range(10)
    )
    long = replace(
        picture(), nodes=nodes, captured=nodes, reason="because " * 40,
        tried={"an algorithm, " * 10: 1.0},
    )  # fmt: skip
    for words in (text(long), text(towers()), placement_table(long)):
        assert max(map(len, words.splitlines())) <= 100
    row = placement_table(long).splitlines()[1]
    assert row.startswith("a_module")
    assert "..." in row
    assert "worker:0/cuda:0" in row


def test_many_operators_are_listed_by_module() -> None:
    lines = text(chain(600, "layer_{}.part")).splitlines()
    assert lines[0] == "captured: 600 operators of Net"
    assert lines[1].split() == ["layer_0", "10", "operators"]
    assert sum("n599" in line for line in lines) == 0
    assert "n399" in text(chain(400, "layer_{}"))


def test_quantities() -> None:
    assert [milliseconds(each) for each in (0, 1e-9, 1.234e-5, 0.5, 12.5)] == [
        "0", "<0.001", "0.0123", "500", "12,500",
    ]  # fmt: skip
    assert (duration(0.0123), duration(2)) == ("12.3 ms", "2 s")
    assert (size(12), size(1536)) == ("12 B", "1.5 KiB")
    assert (count(1, "place"), count(2000, "batch", "es")) == ("1 place", "2,000 batches")

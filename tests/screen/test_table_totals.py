"""Totals of tables, over the servers that hold their parts."""

from __future__ import annotations

from trireme.screen.table_totals import TableTotals, table_totals


def status(name: str, rows: int, hottest: str) -> dict[str, float | str]:
    counts = {"rows": rows, "waiting": 1, "bytes": 1024, "hits": 30, "misses": 10, "admitted": 9}
    numbers = {f"table/{count}/{name}": float(value) for count, value in counts.items()}
    return {**numbers, f"table/dropped/{name}": 2, f"table/hottest/{name}": hottest}


def test_parts_are_added_up() -> None:
    words = [status("words/of all", 5, "7 (9), -3 (1)"), status("words/of all", 6, "-9 (12)")]
    assert table_totals([*words, {"rows": 3.0}]) == [
        TableTotals("words/of all", 11, 2, 2048, 60, 20, 18, 4, ((-9, 12), (7, 9), (-3, 1)))
    ]


def test_tables_come_in_the_order_of_their_names() -> None:
    found = table_totals([status("b", 1, "") | status("a", 2, "")])
    assert [(each.name, each.rows, each.hottest) for each in found] == [("a", 2, ()), ("b", 1, ())]


def test_a_line() -> None:
    (totals,) = table_totals([status("words", 1_234_567, "7 (1200), -3 (800)")])
    assert totals.line() == (
        "table words: 1,234,567 rows in 1.0 KiB; 75.0% of pulled keys had rows; keys waiting for "
        "admission: 1; 2 dropped; hottest keys: 7 (1,200 updates), -3 (800)"
    )
    (empty,) = table_totals([{"table/rows/words": 0}])
    assert empty.line() == "table words: 0 rows in 0 B"

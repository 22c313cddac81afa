"""CSV: columns by name, quotes, and lines that are no rows."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

pytest.importorskip("numba")
pytest.importorskip("pyarrow")

from sparse_data import CsvReader, feature

from tests.examples.sparse_data.rows import rows_of, written
from trireme.errors import ConfigurationError, DataError

TEXT = st.text(st.characters(blacklist_characters="\r\n", codec="utf-8"), max_size=6)


def reader(path: Path, **options: object) -> CsvReader:
    named = {"label": "y", "numbers": ["n"], "categories": ["c"], **options}
    return CsvReader(path, **named)  # type: ignore[arg-type]


def test_rows(tmp_path: Path) -> None:
    text = 'c,other,y,n\nred,7,1,0.5\n"a ""b"", c",,"0","2"\r\n,"x,y",1,\n'
    number = feature("n", "", 24)
    assert rows_of(reader(written(tmp_path / "table", text))) == [
        (1.0, [(number, 0.5), (feature("c", "red", 24), 1.0)]),
        (0.0, [(number, 2.0), (feature("c", 'a "b", c', 24), 1.0)]),
        (1.0, [(feature("c", "", 24), 1.0)]),
    ]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(TEXT, TEXT), max_size=5), st.sampled_from([",", ";", "\t"]))
def test_fields_are_those_of_pythons_csv(
    tmp_path: Path, fields: list[tuple[str, str]], delimiter: str
) -> None:
    path = tmp_path / "table"
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, delimiter=delimiter)
        writer.writerows([("y", "c", "d"), *((1, *each) for each in fields)])
    rows = reader(path, numbers=[], categories=["c", "d"], delimiter=delimiter, hash_bits=40)
    wanted = [[feature(name, value, 40) for name, value in zip("cd", f)] for f in fields]  # noqa: B905
    assert [[key for key, _ in pairs] for _, pairs in rows_of(rows)] == wanted


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("red,no,1", "column y is no number"),
        ("red,,1", "the label is empty"),
        ("red,1", "it should have 3 columns and has 2"),
        ("red,1,2,3", "it should have 3 columns and has 4"),
        ("red,1,two", "column n is no number"),
        ('red,1,"2', "column n is no number"),
        ('"red,1,2', "it should have 3 columns and has 1"),
        ('"red\nblue",1,2', "it should have 3 columns and has 1"),
    ],
)
def test_a_line_that_is_no_row(tmp_path: Path, line: str, reason: str) -> None:
    path = written(tmp_path / "table", f"c,y,n\nred,1,2\n{line}\n")
    with pytest.raises(DataError, match=f"table, line 3: {reason}"):
        list(reader(path))


def test_columns_that_are_not_there(tmp_path: Path) -> None:
    path = written(tmp_path / "table", "c,y\n")
    with pytest.raises(DataError, match="table has no column 'n': its first line names c, y"):
        reader(path)
    with pytest.raises(ConfigurationError, match="the column 'y' is named twice"):
        reader(path, categories=["y"])
    with pytest.raises(ConfigurationError, match="without features"):
        reader(path, categories=[], numbers=[])
    with pytest.raises(ConfigurationError, match="delimiter="):
        reader(path, delimiter="::")
    with pytest.raises(DataError, match="names a column twice"):
        reader(written(tmp_path / "table", "c,c,y\n"))


def test_files_have_one_header(tmp_path: Path) -> None:
    paths = [written(tmp_path / name, f"{head}\nred,1,2\n") for name, head in
             (("a", "c,y,n"), ("b", "c,y,n"), ("c", "c,n,y"))]  # fmt: skip
    rows = CsvReader(paths[:2], label="y", categories=["c"])
    assert len(rows_of(rows)) == 2
    with pytest.raises(DataError, match=r"c has the columns c, n, y, and .*a has c, y, n"):
        list(CsvReader(paths, label="y", categories=["c"]))

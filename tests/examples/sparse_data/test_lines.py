"""Windows of lines: ranges of bytes cut a file into the same lines, wherever they cut."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

pytest.importorskip("numba")
pytest.importorskip("pyarrow")

from sparse_data.lines import LineWindow, bad_line

from tests.examples.sparse_data.rows import written
from trireme.errors import DataError

FILES = st.lists(st.binary(max_size=12).map(lambda b: b.replace(b"\n", b"?")), max_size=12).map(
    b"\n".join
)


def lines_of(path: Path, begin: int, end: int, block: int, at_once: int) -> list[tuple[int, bytes]]:
    """The lines of a range with their places, consumed some at a time."""
    window, found = LineWindow(path, begin, end, block), []
    while window.fill():
        for _ in range(at_once):
            if window.start == window.stop:
                break
            text = window.data[window.start : window.stop].tobytes()
            line = text[: text.index(b"\n") + 1]
            found.append((window.place, line))
            window.start += len(line)
    window.close()
    return found


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(FILES, st.lists(st.integers(0, 150), max_size=4), st.integers(2, 40), st.integers(1, 3))
def test_ranges_have_each_line_once(
    tmp_path: Path, data: bytes, cuts: list[int], block: int, at_once: int
) -> None:
    if data.startswith((b"\x1f\x8b", b"BZh", b"PK\x03\x04", b"\x28\xb5\x2f\xfd")):
        return
    path = written(tmp_path / "file", data)
    bounds = [0, *sorted(min(cut, len(data)) for cut in cuts), len(data)]
    found = [each for pair in pairwise(bounds) for each in lines_of(path, *pair, block, at_once)]
    whole = data if data.endswith(b"\n") or not data else data + b"\n"
    assert b"".join(line for _, line in found) == whole
    for place, line in found:
        assert whole[place : place + len(line)] == line
        assert place == 0 or whole[place - 1 : place] == b"\n"


def test_a_line_belongs_to_the_range_of_its_first_byte(tmp_path: Path) -> None:
    data = b"ab\n\ncde\nf\n"
    path = written(tmp_path / "file", data)
    starts = [0, 3, 4, 8]
    for cut in range(len(data) + 1):
        first = [place for place, _ in lines_of(path, 0, cut, 4, 1)]
        second = [place for place, _ in lines_of(path, cut, len(data), 4, 1)]
        assert first == [start for start in starts if start < cut]
        assert second == [start for start in starts if start >= cut]


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(FILES, st.integers(2, 40))
def test_reading_goes_on_at_the_place_of_any_line(tmp_path: Path, data: bytes, block: int) -> None:
    if data.startswith((b"\x1f\x8b", b"BZh", b"PK\x03\x04", b"\x28\xb5\x2f\xfd")):
        return
    path = written(tmp_path / "file", data)
    found = lines_of(path, 0, len(data), block, 1)
    for number, (place, _) in enumerate(found):
        assert lines_of(path, place, len(data), block, 1) == found[number:]


def test_a_packed_file_is_refused(tmp_path: Path) -> None:
    path = written(tmp_path / "rows.gz", b"\x1f\x8b\x08\x00")
    with pytest.raises(DataError, match=r"rows\.gz is packed: unpack it"):
        LineWindow(path, 0, 4)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="nothing cannot be read: No such file"):
        LineWindow(tmp_path / "nothing", 0, 4)


def test_a_bad_line_is_named_by_its_number(tmp_path: Path) -> None:
    path = written(tmp_path / "rows", b"a\n\nb\n" + b"c" * 100 + b"\n")
    text = str(bad_line(path, 5, "it is long", b"c" * 100 + b"\n"))
    assert text == f"{path}, line 4: it is long: '{'c' * 60}...'. Correct or remove the line."

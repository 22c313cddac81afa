"""Rows of Criteo's format: missing fields, hashed categories, and lines that are no rows."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

pytest.importorskip("numba")
pytest.importorskip("pyarrow")

from sparse_data import ClickBatch, CriteoReader, feature, log_scale

from tests.examples.sparse_data.rows import written
from trireme.errors import DataError

COUNTS = ["1", "", "-3", *[str(n) for n in range(10)]]
CATEGORIES = ["68fd1e64", "", *[f"{n:08x}" for n in range(24)]]


def line(label: str = "1", counts: list[str] = COUNTS, categories: list[str] = CATEGORIES) -> str:
    return "\t".join([label, *counts, *categories])


def test_rows(tmp_path: Path) -> None:
    empty = line("0", [""] * 13, [""] * 26)
    reader = CriteoReader(written(tmp_path / "day", f"{line()}\n{empty}\r\n"), hash_bits=20)
    (batch,) = reader
    assert batch.labels.tolist() == [1.0, 0.0]
    wanted = torch.tensor([float(text or "nan") for text in COUNTS])
    assert torch.equal(batch.counts[0].nan_to_num(-9), wanted.nan_to_num(-9))
    assert batch.counts[1].isnan().all()
    names = [f"C{number}" for number in range(1, 27)]
    for row, values in enumerate((CATEGORIES, [""] * 26)):
        keys = [feature(name, value, 20) for name, value in zip(names, values, strict=True)]
        assert batch.keys[row].tolist() == keys
    assert [tuple(t.shape) for t in batch] == [(2, 13), (2, 26), (2,)]
    assert batch.keys.dtype == torch.int64 and batch.counts.dtype == torch.float32


def test_the_scale_of_integers(tmp_path: Path) -> None:
    (batch,) = CriteoReader(written(tmp_path / "day", line()))
    assert log_scale(batch.counts)[0, :4].tolist() == pytest.approx([0.6931472, 0.0, 0.0, 0.0])
    assert log_scale(batch.counts)[0, 12].item() == pytest.approx(2.302585)


def test_joined(tmp_path: Path) -> None:
    reader = CriteoReader(written(tmp_path / "day", f"{line()}\n" * 5), 2)
    joined = ClickBatch.join(list(reader))
    assert joined.labels.tolist() == [1.0] * 5
    assert joined.keys.shape == (5, 26)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (line("2"), "the label is not 0 or 1"),
        (line("10"), "the label is not 0 or 1"),
        (line(""), "the label is not 0 or 1"),
        (line(categories=CATEGORIES[:25]), "it should have 40 columns and has 39"),
        ("1", "it should have 40 columns and has 1"),
        ("1\t2\t3", "it should have 40 columns and has 3"),
        (line(categories=[*CATEGORIES, ""]), "it should have 40 columns and has 41"),
        (line(counts=["x", *COUNTS[1:]]), "column I1 is no number"),
        (line(counts=["inf", *COUNTS[1:]]), "column I1 is no finite number"),
        (f"{line()}\r{line()}", "a field has a line break"),
    ],
)
def test_a_line_that_is_no_row(tmp_path: Path, text: str, reason: str) -> None:
    path = written(tmp_path / "day", f"{line()}\n{text}\n")
    with pytest.raises(DataError, match=f"day, line 2: {reason}"):
        list(CriteoReader(path))


def test_entries_are_what_a_linear_model_takes() -> None:
    counts = torch.tensor([[float("nan"), *range(12)], [7.0] * 13])
    batch = ClickBatch(counts, torch.arange(52).reshape(2, 26), torch.tensor([0.0, 1.0]))
    found = batch.entries()
    assert found.offsets.tolist() == [0, 39] and found.labels.tolist() == [0.0, 1.0]
    assert found.keys.tolist() == [*range(-13, 0), *range(26), *range(-13, 0), *range(26, 52)]
    values = found.values.reshape(2, 39)
    assert torch.equal(values[:, :13], log_scale(counts))
    assert torch.equal(values[:, 13:], torch.ones(2, 26))

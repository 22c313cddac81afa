"""Rows in files of Arrow's, as a worker reads them; what Spark writes is in test_spark.py."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader

from trireme.errors import ConfigurationError, DataError
from trireme.spark.rows import Rows, Written, write

pa = pytest.importorskip("pyarrow")


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    files = []
    for name, first, count in (("b.arrow", 0, 3), ("a.arrow", 3, 4)):
        numbers = range(first, first + count)
        table = pa.table(
            {
                "id": pa.array(numbers, pa.int64()),
                "x": pa.array([[i, 2.0 * i] for i in numbers], pa.list_(pa.float32())),
                "y": pa.array([i % 2 == 1 for i in numbers], pa.bool_()),
                "word": [f"w{i}" for i in numbers],
                "gap": pa.array([None if i == 4 else i for i in numbers], pa.int32()),
            }
        )
        with pa.ipc.new_file(str(tmp_path / name), table.schema) as writer:
            for batch in table.to_batches(max_chunksize=2):
                writer.write_batch(batch)
        files.append((name, count))
    Written({"id": "bigint"}, files).save(tmp_path)
    (tmp_path / "c.arrow").write_bytes(b"what a task that failed has left")
    return tmp_path


def test_rows_have_the_numbers_of_the_files_in_their_order(directory: Path) -> None:
    rows = Rows(directory)
    assert len(rows) == 7
    assert [int(rows[number]["id"]) for number in range(7)] == list(range(7))
    assert torch.equal(rows[5]["x"], torch.tensor([5.0, 10.0]))
    assert (rows[5]["y"].dtype, bool(rows[5]["y"]), rows[5]["word"]) == (torch.bool, True, "w5")
    assert (rows[3]["gap"], rows[4]["gap"]) == (3, None)
    assert int(rows[-1]["id"]) == int(rows[torch.tensor(6)]["id"]) == 6
    with pytest.raises(IndexError, match="row 7 of 7 rows"):
        rows[7]


def test_a_loader_gets_many_rows_at_once_and_in_the_order_it_asks_for(directory: Path) -> None:
    rows = Rows(directory)
    asked = [6, 0, 3, 0, 2]
    assert [int(each["id"]) for each in rows.__getitems__(asked)] == asked
    named = ("id", "x", "y")
    for workers in (0, 2):
        loader = DataLoader(
            rows,
            batch_size=7,
            num_workers=workers,
            collate_fn=lambda found: {n: torch.stack([each[n] for each in found]) for n in named},
        )
        (batch,) = loader
        assert batch["x"].shape == (7, 2) and batch["x"].dtype == torch.float32
        assert batch["id"].tolist() == list(range(7))


def test_rows_travel_without_what_is_mapped(directory: Path) -> None:
    rows = Rows(directory)
    before = len(pickle.dumps(rows))
    assert int(rows[6]["id"]) == 6
    assert len(pickle.dumps(rows)) == before
    assert int(pickle.loads(pickle.dumps(rows))[6]["id"]) == 6


def test_what_is_not_there_is_said(directory: Path, tmp_path: Path) -> None:
    rows = Rows(directory)
    (directory / "a.arrow").unlink()
    with pytest.raises(DataError, match=r"a\.arrow.*shared file system"):
        rows[4]
    (directory / "b.arrow").write_bytes(b"cut")
    with pytest.raises(DataError, match=r"b\.arrow"):
        Rows(directory)[0]
    (directory / "rows.json").write_text("{}")
    with pytest.raises(DataError, match=r"rows\.json"):
        Rows(directory)


class Frame:
    """A DataFrame of which nothing is computed."""

    def __init__(self, *columns: tuple[str, str]) -> None:
        self.dtypes, self.columns = list(columns), [name for name, _ in columns]

    def mapInArrow(self, function: object, schema: str) -> None:
        raise AssertionError("it is written again")


def test_rows_that_were_written_before_are_taken_and_that_is_said(directory: Path) -> None:
    said: list[str] = []
    assert len(write(Frame(("id", "bigint")), directory, said.append)) == 7
    assert "7 rows that were written" in said[0]
    with pytest.raises(ConfigurationError, match="name another run_dir"):
        write(Frame(("id", "string")), directory, said.append)


@pytest.mark.parametrize(
    ("frame", "words"),
    [
        (5, "a DataFrame of Spark, or Rows, and not 5"),
        (Frame(("a", "int"), ("a", "int")), "two columns have one name"),
        (Frame(("v", "vector")), "vector_to_array"),
    ],
)
def test_what_no_rows_can_be_made_of_is_refused(tmp_path: Path, frame: object, words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        write(frame, tmp_path / "rows", print)
    assert not (tmp_path / "rows").exists()

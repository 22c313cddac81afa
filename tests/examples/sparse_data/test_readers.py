"""What all readers do: shards, places to go on from, processes, and sessions."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

pytest.importorskip("numba")
pytest.importorskip("pyarrow")

from sparse_data import CsvReader, LibsvmReader, SparseBatch

import trireme
from tests.examples.sparse_data.rows import rows_of, written
from trireme.data.streams import is_stream
from trireme.errors import ConfigurationError, DataError
from trireme.streams.stream import shards_of


@pytest.fixture
def paths(tmp_path: Path) -> list[Path]:
    """Three files of 100 rows: row n has the key n."""
    numbers = (range(40), range(40), range(40, 100))
    texts = ["".join(f"1 {n}:{n}\n" for n in part) for part in numbers]
    texts[0] = ""
    return [written(tmp_path / f"{n}", text) for n, text in enumerate(texts)]


def keys(batches: object) -> list[int]:
    return [pairs[0][0] for _, pairs in rows_of(batches)]  # type: ignore[arg-type]


@pytest.mark.parametrize("count", [1, 2, 3, 7, 150])
def test_shards_have_each_row_once(paths: list[Path], count: int) -> None:
    reader = LibsvmReader(paths, 3, num_shards=count)
    assert is_stream(reader) and shards_of(reader) == count
    parts = [keys(reader.shard(num_shards=count, index=index)) for index in range(count)]
    assert [key for part in parts for key in part] == list(range(100))
    if count == 7:
        assert max(map(len, parts)) < 25
    again = reader.shard(2, 1).shard(2, 0)
    assert 0 < len(keys(again)) < 50, "a shard has shards"


def test_there_is_no_such_shard(paths: list[Path]) -> None:
    with pytest.raises(ConfigurationError, match="shard 3 of 3: the last is 2"):
        LibsvmReader(paths).shard(3, 3)


@pytest.mark.parametrize("taken", [0, 1, 5, 13, 33, 34])
def test_reading_goes_on_at_a_state(paths: list[Path], taken: int) -> None:
    reader = LibsvmReader(paths, 3)
    first = iter(reader)
    before = [next(first) for _ in range(taken)]
    after = iter(LibsvmReader(paths, 7))
    after.load_state_dict(first.state_dict())
    assert keys(before) + keys(after) == list(range(100))


def test_a_header_is_passed_at_any_state(tmp_path: Path) -> None:
    path = written(tmp_path / "table", "y,n\n" + "".join(f"{n},1\n" for n in range(10)))
    reader = CsvReader(path, 4, label="y", numbers=["n"])
    batches = iter(reader)
    again = iter(reader)
    again.load_state_dict(batches.state_dict())
    assert [b.labels.tolist() for b in again] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    shards = [reader.shard(5, index) for index in range(5)]
    assert [n for each in shards for b in each for n in b.labels.tolist()] == list(range(10))


def test_a_state_of_another_shard_is_refused(paths: list[Path]) -> None:
    last = iter(LibsvmReader(paths).shard(2, 1))
    with pytest.raises(DataError, match="the state is of another shard"):
        last.load_state_dict({"byte": 0})


def test_the_last_line_of_a_shard_may_reach_into_the_next(paths: list[Path]) -> None:
    shard = iter(LibsvmReader(paths).shard(3, 0))
    list(shard)
    shard.load_state_dict(shard.state_dict())
    assert list(shard) == []


def test_processes_share_the_rows(paths: list[Path]) -> None:
    loader = DataLoader(LibsvmReader(paths, 10), batch_size=None, num_workers=2)
    assert sorted(keys(loader)) == list(range(100))


def test_joined_batches_are_one(paths: list[Path]) -> None:
    batches = list(LibsvmReader(paths, 30))
    joined = SparseBatch.join(batches)
    assert keys([joined]) == keys(batches)
    assert SparseBatch.join(batches[:1]) is batches[0]


class Scores(nn.Module):
    """A bag of one weight a key: logistic regression."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.EmbeddingBag(100, 1, mode="sum")
        nn.init.zeros_(self.weights.weight)

    def forward(
        self, offsets: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
    ) -> torch.Tensor:
        return self.weights(keys, offsets, values).squeeze(1)


def test_a_session_counts_each_row_once_an_epoch(paths: list[Path]) -> None:
    session = trireme.Session(
        Scores(),
        nn.BCEWithLogitsLoss(),
        lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        log_every=1000,
    )
    seen: Counter[int] = Counter()
    rows = LibsvmReader(paths, 4, num_shards=5)
    with session:
        for _ in session.epochs(2):
            for batch in session.loader(rows, batch_size=2, collate_fn=SparseBatch.join):
                seen.update(batch.data.keys.tolist())
                session.step(batch)
        result = session.evaluate(rows, batch_size=2, collate_fn=SparseBatch.join)
    assert result["loss"] < 0.1
    assert seen == Counter({key: 2 for key in range(100)})

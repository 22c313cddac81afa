"""Loaders as people have them: resumed, restarted, padded, with processes of their own."""

from __future__ import annotations

from pathlib import Path
from threading import Event
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, WeightedRandomSampler, random_split

import trireme
from tests.data.sources import BATCH, SIZE, Flow, Rows, Unequal, example, kinds, padded
from tests.harness import Cluster, run_job
from trireme.errors import ConfigurationError
from trireme.session.session import Session


def make(run_dir: Path | None = None, **options: Any) -> Session:
    torch.manual_seed(0)
    model = nn.Linear(2, 1)
    sgd = torch.optim.SGD(model.parameters(), 0.0)
    return trireme.Session(model, nn.functional.mse_loss, sgd, run_dir=run_dir, **options)


def order(session: Session, dataset: Any, arguments: dict[str, Any], epochs: int = 3) -> list[Any]:
    """The examples of each batch, with the epochs of the loop and of the batch."""
    found = []
    for epoch in session.epochs(epochs):
        for batch in session.loader(dataset, **arguments):
            session.step(batch)
            found.append((epoch, batch.epoch, batch[0][:, 0].tolist()))
    return found


@pytest.mark.thorough
@pytest.mark.parametrize("kind", kinds())
def test_a_resumed_job_goes_on_at_the_exact_example(kind: str, tmp_path: Path) -> None:
    dataset, arguments = kinds()[kind]
    with make() as session:
        whole = order(session, dataset, arguments)
    parts = []
    for steps in (5, 17, 20, None):
        with make(tmp_path, max_steps=steps) as session:
            parts += order(session, dataset, arguments)
    assert [example for *_, batch in parts for example in batch] == [
        example for *_, batch in whole for example in batch
    ]
    assert parts == whole
    assert [epoch for epoch, *_ in whole] == sorted(epoch for epoch, *_ in whole)
    with make(tmp_path) as session:
        assert order(session, dataset, arguments) == [], "all epochs are done"


def test_a_stream_is_read_from_its_beginning(tmp_path: Path) -> None:
    with make(tmp_path, max_steps=5) as session:
        order(session, Flow(200), {"batch_size": 10})
    with make(tmp_path, max_steps=6) as session:
        ((_, _, numbers),) = order(session, Flow(200), {"batch_size": 10})
    assert numbers == list(range(50, 60))


def test_another_number_of_shards_is_refused(tmp_path: Path) -> None:
    with make(tmp_path, max_steps=3) as session:
        order(session, Flow(50), {"batch_size": 4})
    sharded, arguments = kinds()["shards"]
    with make(tmp_path) as session, pytest.raises(trireme.Rejected, match="a stream of 4 shards"):
        order(session, sharded, arguments)


def test_an_iteration_that_is_left_early_goes_on_in_the_next() -> None:
    with make() as session:
        loader = session.loader(Rows(20), 3, shuffle=False)
        found: list[float] = []
        for epoch in session.epochs(2):
            for number, batch in enumerate(loader):
                session.step(batch)
                found += batch[0][:, 0].tolist()
                if epoch == 0 and number == 2:
                    break
        assert found == [*map(float, range(20)), *map(float, range(20))]


@pytest.mark.parametrize("cluster", [Cluster(servers=0), Cluster(), Cluster(strategy="sync")])
def test_an_epoch_that_is_left_early_ends_in_its_own_order(cluster: Cluster) -> None:
    def program(session: Session) -> list[tuple[int, list[float]]]:
        found = []
        for epoch in session.epochs(3):
            chosen = list(range(10)) if epoch != 1 else list(range(9, -1, -1))
            for number, batch in enumerate(session.loader(Rows(10), 4, sampler=chosen)):
                session.step(batch)
                found.append((batch.epoch, batch[0][:, 0].tolist()))
                if epoch == 0 and number == 0:
                    break
        return found

    (found,) = run_job(cluster, lambda _: make(), program).values
    forth, back = [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]], [[9, 8, 7, 6], [5, 4, 3, 2], [1, 0]]
    assert [batch for _, batch in found] == [*forth, *back, *forth]
    assert [epoch for epoch, _ in found] == [0] * 3 + [1] * 3 + [2] * 3


def test_a_stream_s_batch_that_could_not_be_made_is_made_again() -> None:
    failures = iter((False, True, False, True))

    def collate(examples: list[Any]) -> Any:
        if next(failures, False):
            raise ValueError("damaged")
        return torch.utils.data.default_collate(examples)

    with make() as session:
        loader = session.loader(Flow(20), 3, collate_fn=collate, epochs=1)
        found: list[float] = []
        for _ in range(3):
            try:
                for batch in loader:
                    session.step(batch)
                    found += batch[0][:, 0].tolist()
            except ValueError:
                continue
    assert found == [*map(float, range(20))]


def test_epochs_end_the_job_without_session_epochs() -> None:
    with make() as session:
        batches = list(map(session.step, session.loader(Flow(10), 4, epochs=2)))
        assert len(batches) == 6
    with make() as session:
        sizes = [len(batch) for batch in session.loader(Rows(10), 4, epochs=2, drop_last=True)]
        assert sizes == [4] * 4


def test_epochs_in_epochs_are_refused() -> None:
    with make() as session, pytest.raises(ConfigurationError, match="no epochs of its own"):
        for _ in session.epochs(2):
            for _ in session.epochs(2):
                pass


def test_processes_stay_between_epochs() -> None:
    with make() as session:
        loader = session.loader(
            Rows(9), 2, shuffle=False, num_workers=1, persistent_workers=True, prefetch_factor=3
        )
        for _ in session.epochs(2):
            found = []
            for batch in loader:
                session.step(batch)
                found += batch[0][:, 0].tolist()
            assert found == list(range(9))


# -- examples of different lengths --------------------------------------------------------------


class Sums(nn.Module):
    """A number from a padded row: what follows a -1 does not count."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(1, 1)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        mask = (inputs >= 0).float().unsqueeze(-1)
        return (self.linear(inputs.unsqueeze(-1) / SIZE) * mask).sum(1) / mask.sum(1)


def make_padded(index: int = 0) -> Session:
    torch.manual_seed(0)
    model = Sums()
    sgd = torch.optim.SGD(model.parameters(), 0.1)
    return trireme.Session(model, nn.functional.mse_loss, sgd)


def trained(batch_size: int) -> Any:
    def program(session: Session) -> list[torch.Tensor]:
        for _ in session.epochs(3):
            loader = DataLoader(Unequal(SIZE), batch_size, collate_fn=padded, shuffle=True)
            for batch in session.loader(loader):
                session.step(batch)
        found = session.evaluate(Unequal(SIZE), 7, collate_fn=padded)
        again = session.evaluate(DataLoader(Unequal(SIZE), 7, collate_fn=padded, shuffle=True))
        assert found == pytest.approx(again)
        return [torch.tensor(found["loss"])]

    return program


def test_rounds_of_padded_batches_are_the_same_as_one_batch() -> None:
    """Batches of different shapes, the last of an epoch of different sizes too."""
    (alone,) = run_job(Cluster(servers=0), make_padded, trained(3 * BATCH)).values
    together = run_job(Cluster(workers=3, strategy="sync"), make_padded, trained(BATCH)).values
    torch.testing.assert_close(together[0], alone, rtol=1e-5, atol=1e-7)


def test_evaluation_counts_each_example_of_every_kind_once() -> None:
    with make() as session:
        tensors = TensorDataset(
            *(torch.stack(each) for each in zip(*map(example, range(30)), strict=True))
        )
        expected = session.evaluate(tensors)
        for dataset in (Rows(30), Flow(30), DataLoader(Rows(30), 7, drop_last=True)):
            batch_size = None if isinstance(dataset, DataLoader) else 8
            assert session.evaluate(dataset, batch_size) == pytest.approx(expected)
        with pytest.raises(ConfigurationError, match="the DataLoader has its batch size"):
            session.evaluate(DataLoader(Rows(30), 7), 8)


def test_an_evaluation_reads_a_stream_in_one_process() -> None:
    with make() as session:
        for arguments in (
            (Flow(10), 5, {"num_workers": 2}),
            (DataLoader(Flow(10), 5, num_workers=2), None, {}),
        ):
            dataset, batch_size, options = arguments
            with pytest.raises(ConfigurationError, match="num_workers=2 with a Flow"):
                session.evaluate(dataset, batch_size, **options)


def test_an_evaluation_does_not_draw_examples_by_weight() -> None:
    weighted = WeightedRandomSampler([0.0] * 9 + [1.0], 10)
    with make() as session:
        expected = session.evaluate(Rows(10))
        assert session.evaluate(DataLoader(Rows(10), 5, sampler=weighted)) == pytest.approx(
            expected
        )


def test_an_evaluation_of_nothing_is_refused() -> None:
    with make() as session:
        for nothing in (Rows(0), Flow(0), DataLoader(Rows(0), 7)):
            with pytest.raises(ConfigurationError, match="the data set has no examples"):
                session.evaluate(nothing)


def halves_of(seed: int) -> Any:
    generator = torch.Generator().manual_seed(seed)
    return random_split(Rows(40), [20, 20], generator=generator)[0]


def test_workers_that_split_the_data_differently_are_told() -> None:
    for strategy in ("async", "sync"):
        asked = [Event(), Event()]

        def program(session: Session, asked: list[Event] = asked) -> str:
            index = session.task.index
            try:
                for batch in session.loader(halves_of(index), 4, epochs=2):
                    asked[index].set()
                    assert asked[1 - index].wait(30)  # else the quicker one may deal everything
                    session.step(batch)
            except trireme.Rejected as error:
                return str(error)
            finally:
                asked[index].set()
            return ""

        said = run_job(Cluster(workers=2, strategy=strategy), lambda _: make(), program).values
        assert any(
            "different orders within an epoch" in each and "random_split" in each for each in said
        ), said


def test_a_job_that_is_resumed_within_an_epoch_keeps_its_split(tmp_path: Path) -> None:
    with make(tmp_path, max_steps=3) as session:
        order(session, halves_of(0), {"batch_size": 4})
    with make(tmp_path) as session, pytest.raises(trireme.Rejected, match="in another order"):
        order(session, halves_of(1), {"batch_size": 4})
    with make(tmp_path) as session:
        parts = order(session, halves_of(1), {"batch_size": 4, "resized": True})
    assert [epoch for epoch, *_ in parts] == [1] * 5 + [2] * 5

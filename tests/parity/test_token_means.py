"""A loss that is a mean over tokens: several workers, pieces or batches as one joined batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import trireme
from tests.harness import Cluster, run_job
from tests.process_groups import ProcessGroup, run_process_group
from trireme.session.session import Session

pytestmark = [pytest.mark.processes, pytest.mark.timeout(300)]

WORDS, LENGTH, SIZE, BATCH = 11, 9, 32, 8


class Texts(Dataset[dict[str, torch.Tensor]]):
    """Rows of tokens, of which few to all have a label."""

    def __init__(self, unlabelled: int = 0) -> None:
        generator = torch.Generator().manual_seed(1)
        self.ids = torch.randint(WORDS, (SIZE, LENGTH), generator=generator)
        self.labels = self.ids.roll(-1, 1)
        for row in range(SIZE):
            self.labels[row, 1 + row % LENGTH :] = -100
        self.labels[:unlabelled] = -100

    def __len__(self) -> int:
        return SIZE

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.ids[index], "labels": self.labels[index]}


class Language(nn.Module):
    """A language model, which computes its own loss from the labels as Transformers' do."""

    def __init__(self, shifts: bool = False) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(WORDS, 6), nn.Linear(6, WORDS)
        self.loss_type = "ForCausalLM" if shifts else None

    def forward(
        self, input_ids: torch.Tensor, labels: torch.Tensor | None = None
    ) -> dict[str, torch.Tensor]:
        logits = self.head(self.embed(input_ids))
        if labels is None:
            return {"logits": logits}
        shown = logits[:, :-1] if self.loss_type else logits
        wanted = labels[:, 1:] if self.loss_type else labels
        return {"loss": nn.functional.cross_entropy(shown.flatten(0, 1), wanted.flatten())}


def token_mean(outputs: Any, targets: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(outputs["logits"].flatten(0, 1), targets.flatten())


def tokens(batch: Any, outputs: Any) -> torch.Tensor:
    counted: torch.Tensor = (batch["labels"] != -100).sum()
    return counted


def make(kind: str, **options: Any) -> Session:
    torch.manual_seed(0)
    model = Language(shifts=kind == "causal")
    loss = token_mean if kind == "weight" else trireme.model_loss
    if kind == "weight":
        options["weight"] = tokens
    return Session(model, loss, torch.optim.SGD(model.parameters(), 0.5), **options)


KINDS = ["labels", "causal", "weight"]


def train(session: Session, batch_size: int, data: Texts) -> dict[str, Any]:
    for batch in session.loader(data, batch_size, epochs=2):
        session.step(batch)
    return session.evaluate(data, 5)


def in_a_process(kind: str, unlabelled: int) -> float:
    with make(kind) as session:
        return train(session, BATCH // session.batches_per_step, Texts(unlabelled))["loss"]


def alone(kind: str, unlabelled: int = 0, **options: Any) -> float:
    with make(kind, **options) as session:
        return train(session, BATCH, Texts(unlabelled))["loss"]


@pytest.mark.slow(one_in=2)
@pytest.mark.parametrize("unlabelled", [0, 16])
@pytest.mark.parametrize("kind", KINDS)
def test_synchronous_workers_weigh_by_tokens(kind: str, unlabelled: int) -> None:
    cluster = Cluster(workers=2, strategy="sync")
    found = run_job(
        cluster, lambda _: make(kind), lambda s: train(s, BATCH // 2, Texts(unlabelled))
    ).values
    for each in found:
        assert each["loss"] == pytest.approx(alone(kind, unlabelled), rel=1e-6)


@pytest.mark.slow(one_in=2)
@pytest.mark.parametrize("strategy", ["allreduce", "fsdp"])
@pytest.mark.parametrize("kind", KINDS)
def test_replicas_weigh_by_tokens(kind: str, strategy: str) -> None:
    group = ProcessGroup(workers=2, strategy=strategy)
    for each in run_process_group(group, in_a_process, kind, 12).values:
        assert each == pytest.approx(alone(kind, 12), rel=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_pieces_of_a_batch_weigh_by_tokens(kind: str) -> None:
    assert alone(kind, 12, accumulate=4) == pytest.approx(alone(kind, 12), rel=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_an_evaluation_does_not_depend_on_the_batch_size(kind: str) -> None:
    with make(kind, metrics={"same": lambda outputs, targets: outputs_loss(outputs, targets)}) as s:
        found = [s.evaluate(Texts(12), size) for size in (1, 3, 5, SIZE)]
    for each in found:
        assert each["loss"] == pytest.approx(found[-1]["loss"], rel=1e-6)
        assert each["same"] == pytest.approx(each["loss"], rel=1e-6)


def outputs_loss(outputs: Any, targets: torch.Tensor) -> torch.Tensor:
    return outputs["loss"] if "loss" in outputs else token_mean(outputs, targets)


def test_a_weight_that_needs_outputs_is_refused_where_there_are_none() -> None:
    by_outputs = lambda batch, outputs: outputs["logits"].shape[0]  # noqa: E731
    with make("labels", weight=by_outputs, accumulate=2) as session:
        (batch,) = [next(iter(session.loader(Texts(), 4)))]
        with pytest.raises(trireme.ConfigurationError, match="weigh by the batch alone"):
            session.step(batch)


@pytest.mark.parametrize("number", [-1.0, float("nan")])
def test_a_weight_is_a_number_from_0(number: float) -> None:
    with make("labels", weight=lambda batch, outputs: number) as session:
        batch = next(iter(session.loader(Texts(), 4)))
        with pytest.raises(trireme.ConfigurationError, match="weight= returned"):
            session.step(batch)


def loop_of_sizes(sizes: list[int], says: bool, unlike: int = 0) -> list[str]:
    """Trains a loop of its own on batches of these sizes; returns the warnings of sizes.

    Those of the second worker have so many examples more.
    """
    torch.manual_seed(0)
    model = nn.Linear(2, 1)
    optimizer = trireme.distribute(model, torch.optim.SGD(model.parameters(), 0.1))
    said: list[str] = []
    optimizer.worker.progress.warn = said.append  # type: ignore[method-assign]
    for number, size in enumerate(sizes):
        size += optimizer.replica * unlike
        optimizer.zero_grad()
        model(torch.rand(size, 2) + 10 * optimizer.replica + number).mean().backward()
        optimizer.step(examples=size if says else None)
    optimizer.close()
    return [line for line in said if "differ in size" in line]


@pytest.mark.parametrize(
    "group",
    [ProcessGroup(workers=2), ProcessGroup(workers=2, servers=1, strategy="sync")],
    ids=["allreduce", "sync"],
)
def test_loops_that_do_not_say_the_sizes_of_their_batches_are_warned_once(
    group: ProcessGroup,
) -> None:
    for lines in run_process_group(group, loop_of_sizes, [4, 4, 3, 2], False).values:
        assert len(lines) == 1 and "(3 and 4 examples)" in lines[0]


@pytest.mark.parametrize(
    "group",
    [ProcessGroup(workers=2), ProcessGroup(workers=2, servers=1, strategy="sync")],
    ids=["allreduce", "sync"],
)
def test_workers_whose_batches_have_other_sizes_are_warned_once(group: ProcessGroup) -> None:
    chief, other = run_process_group(group, loop_of_sizes, [4] * 8, False, 1).values
    assert len(chief) == 1 and "(4 and 5 examples)" in chief[0] and other == []
    assert not any(run_process_group(group, loop_of_sizes, [4] * 8, True, 1).values)


def test_loops_that_say_them_or_have_none_to_say_are_not_warned() -> None:
    group = ProcessGroup(workers=2)
    assert not any(run_process_group(group, loop_of_sizes, [4, 3, 2], True).values)
    assert not any(run_process_group(group, loop_of_sizes, [4, 4, 4], False).values)


def loop_of_dealt_batches() -> list[str]:
    """Trains a loop of its own on 10 examples, in batches of 3 and the rest; returns warnings."""
    torch.manual_seed(0)
    model = nn.Linear(2, 1)
    optimizer = trireme.distribute(model, torch.optim.SGD(model.parameters(), 0.1))
    said: list[str] = []
    optimizer.worker.progress.warn = said.append  # type: ignore[method-assign]
    rows = TensorDataset(torch.arange(20.0).reshape(10, 2))
    for _, (batch,) in optimizer.epochs(DataLoader(rows, 3, shuffle=True), 2):
        for _ in range(2):  # of one batch, as the steps of several optimizers
            optimizer.zero_grad()
            model(batch).mean().backward()
            optimizer.step()
    optimizer.close()
    return said


def test_loops_whose_data_the_job_deals_are_not_warned_of_sizes() -> None:
    found = run_process_group(ProcessGroup(workers=2), loop_of_dealt_batches).values
    assert found == [[], []]

"""Schedulers: given as a function or as an object, or stepped by the program itself."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from torch.optim.lr_scheduler import ExponentialLR, OneCycleLR
from torch.utils.data import TensorDataset

from tests.harness import Cluster, run_job
from trireme.errors import ConfigurationError
from trireme.session.session import Session

BATCH = (torch.ones(8, 4), torch.zeros(8, 1))


def made(model: torch.nn.Module, optimizer: Any, scheduler: Any, steps: int = 4) -> Session:
    return Session(
        model, torch.nn.functional.mse_loss, optimizer, scheduler=scheduler, max_steps=steps
    )


@pytest.mark.parametrize("cluster", [Cluster(1, 0), Cluster(1, 1, "async")], ids=str)
def test_a_scheduler_may_be_an_object_over_the_sessions_optimizer(cluster: Cluster) -> None:
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = ExponentialLR(optimizer, 0.5)

    def program(session: Session) -> float:
        for _ in range(4):
            session.step(BATCH)
        return float(session.optimizer.param_groups[0]["lr"])

    ran = run_job(cluster, lambda worker: made(model, optimizer, scheduler), program)
    assert ran.values == [pytest.approx(0.1 * 0.5**4)]


def test_a_scheduler_over_another_optimizer_is_refused_by_name() -> None:
    model = torch.nn.Linear(4, 1)
    other = ExponentialLR(torch.optim.SGD(model.parameters(), lr=0.1), 0.5)
    session = made(model, lambda params: torch.optim.SGD(params, lr=0.1), other)
    with pytest.raises(ConfigurationError, match="the ExponentialLR given as scheduler is over"):
        session.__enter__()


@pytest.mark.parametrize("scheduler", [0.5, "cosine", {"gamma": 0.5}])
def test_what_is_no_scheduler_is_refused_by_name(scheduler: Any) -> None:
    with pytest.raises(ConfigurationError, match=r"scheduler=.*a function that builds one"):
        made(torch.nn.Linear(4, 1), lambda params: torch.optim.SGD(params, lr=0.1), scheduler)


def test_a_function_that_returns_no_scheduler_is_refused() -> None:
    session = made(
        torch.nn.Linear(4, 1), lambda params: torch.optim.SGD(params, lr=0.1), lambda _: None
    )
    with pytest.raises(ConfigurationError, match="the scheduler is None: give one of"):
        session.__enter__()


def warnings(cluster: Cluster, change: Any) -> list[list[str]]:
    """What each worker is warned of, where the program changes the learning rate before steps."""

    def program(session: Session) -> list[str]:
        lines: list[str] = []
        with mock.patch.object(session.worker.progress, "warn", lines.append):
            step = 0
            while not session.should_stop():
                change(session, step)
                session.step(BATCH)
                step += 1
        return lines

    def session(worker: int) -> Session:
        steps = 6 if cluster.strategy == "sync" else 12
        optimizer = lambda params: torch.optim.SGD(params, lr=0.1)  # noqa: E731
        return made(torch.nn.Linear(4, 1), optimizer, None, steps)

    return run_job(cluster, session, program).values


def decay(session: Session, step: int) -> None:
    session.optimizer.param_groups[0]["lr"] = 0.1 * 0.9**step


def decay_in_one(session: Session, step: int) -> None:
    if session.task.index == 1 and step >= 2:
        session.optimizer.param_groups[0]["lr"] = 0.05


@pytest.mark.parametrize("servers", [1, 2])
def test_workers_of_a_round_that_disagree_are_told(servers: int) -> None:
    for lines in warnings(Cluster(2, servers, "sync"), decay_in_one):
        assert len(lines) == 1
        assert "disagree about lr" in lines[0] and "0.05" in lines[0] and "worker:1" in lines[0]


def test_workers_of_a_round_that_change_it_alike_are_told_nothing() -> None:
    assert warnings(Cluster(2, 1, "sync"), decay) == [[], []]


def test_a_worker_without_examples_disagrees_with_nobody() -> None:
    rows = TensorDataset(torch.ones(36, 4), torch.zeros(36, 1))  # nine batches, for two workers

    def program(session: Session) -> tuple[int, list[str]]:
        lines, made = list[str](), 0
        with mock.patch.object(session.worker.progress, "warn", lines.append):
            for _ in session.epochs(2):
                for batch in session.loader(rows, batch_size=4):
                    decay(session, session.global_step)
                    session.step(batch)
                    made += 1
        return made, lines

    def session(worker: int) -> Session:
        sgd = lambda params: torch.optim.SGD(params, lr=0.1)  # noqa: E731
        return Session(torch.nn.Linear(4, 1), torch.nn.functional.mse_loss, sgd)

    ran = run_job(Cluster(2, 1, "sync"), session, program).values
    assert sum(made for made, _ in ran) == 18
    assert [lines for _, lines in ran] == [[], []]


def test_without_rounds_a_change_by_the_program_is_pointed_out_once() -> None:
    told = warnings(Cluster(2, 1, "async"), decay)
    assert all(len(lines) <= 1 for lines in told)
    assert any("counts its own steps" in line for lines in told for line in lines)


def test_one_worker_alone_may_change_it_as_it_likes() -> None:
    assert warnings(Cluster(1, 1, "async"), decay) == [[]]


@pytest.mark.parametrize(
    ("cluster", "says"),
    [
        (Cluster(1, 1, "sync"), "whole job, with those before"),
        (Cluster(2, 1, "async"), r"whole job \(each update of any of the 2 workers is one\)"),
    ],
    ids=str,
)
def test_a_schedule_past_its_end_is_refused_with_the_count_that_it_follows(
    cluster: Cluster, says: str
) -> None:
    def session(worker: int) -> Session:
        schedule = lambda optimizer: OneCycleLR(optimizer, 0.1, total_steps=3)  # noqa: E731
        sgd = lambda params: torch.optim.SGD(params, lr=0.1)  # noqa: E731
        return made(torch.nn.Linear(4, 1), sgd, schedule, steps=12)

    def program(session: Session) -> None:
        while not session.should_stop():
            session.step(BATCH)

    says = (
        rf"OneCycleLR given as scheduler has no step 4 .*global step \d+\. .*{says}.*max_steps=12"
    )
    with pytest.raises(ConfigurationError, match=says):
        _ = run_job(cluster, session, program).values

"""What a program asks of an optimizer whose steps servers make: refused by name, or done."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import ExponentialLR
from torch.optim.optimizer import register_optimizer_step_pre_hook

import trireme
from tests.harness import Cluster, run_job
from tests.process_groups import ProcessGroup, run_process_group
from trireme.advice.served_optimizer import replaced_step
from trireme.errors import ConfigurationError
from trireme.session.session import Session

BATCH = (torch.ones(8, 4), torch.zeros(8, 1))
Change = Callable[[torch.optim.Optimizer], object]


def hook(*arguments: Any) -> None:
    """Does nothing."""


def before(optimizer: torch.optim.Optimizer) -> None:
    optimizer.register_step_pre_hook(hook)


def after(optimizer: torch.optim.Optimizer) -> None:
    optimizer.register_step_post_hook(hook)


def another_step(optimizer: torch.optim.Optimizer) -> None:
    step = optimizer.step
    optimizer.step = lambda *given: step(*given)  # type: ignore[method-assign]


def clear(optimizer: torch.optim.Optimizer) -> None:
    optimizer.state.clear()


def write(optimizer: torch.optim.Optimizer) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            optimizer.state[parameter]["exp_avg"] = torch.zeros_like(parameter)


def replace(optimizer: torch.optim.Optimizer) -> None:
    optimizer.state = defaultdict(dict)


CHANGES: dict[Change, str] = {
    before: r"hook\(\), a hook of the steps of the optimizer Adagrad.*hooks=\[",
    after: r"hook\(\), a hook of the steps of the optimizer Adagrad",
    another_step: "lambda.* in the place of the step of the optimizer Adagrad",
    clear: "changed the state of the optimizer Adagrad",
    write: "changed the state of the optimizer Adagrad",
    replace: "changed the state of the optimizer Adagrad",
}


def steps(change: Change, at: int, cluster: Cluster) -> None:
    """Makes three steps, and the change before one of them, or before the session."""
    model = nn.Linear(4, 1)
    optimizer = torch.optim.Adagrad(model.parameters(), lr=0.1)  # has a state before its first step

    def program(session: Session) -> None:
        for step in range(3):
            if step == at:
                change(session.optimizer)
            for parameter in model.parameters():
                assert not session.optimizer.state[parameter].get("momentum")  # as some look
            session.step(BATCH)

    def session(worker: int) -> Session:
        ExponentialLR(optimizer, 0.9)  # which replaces `step` by what only notes the call
        if at < 0:
            change(optimizer)
        return Session(model, nn.functional.mse_loss, optimizer, max_steps=3)

    assert run_job(cluster, session, program).values


@pytest.mark.parametrize("at", [0, 2])
@pytest.mark.parametrize("change", CHANGES)
def test_a_session_refuses_what_would_be_lost(change: Change, at: int) -> None:
    steps(change, at, Cluster(1, 0))
    with pytest.raises(ConfigurationError, match=CHANGES[change]):
        steps(change, at, Cluster(1, 1, "async"))


@pytest.mark.parametrize("change", [before, after, another_step])
def test_what_was_there_before_the_session_is_refused_at_its_beginning(change: Change) -> None:
    with pytest.raises(ConfigurationError, match=CHANGES[change]):
        steps(change, -1, Cluster(1, 1, "async"))


@pytest.mark.parametrize("change", [hook, *CHANGES])
def test_workers_that_make_the_steps_themselves_do_as_asked(change: Change) -> None:
    steps(change, 1, Cluster(1, 1, "averaging", every=2))


def test_a_wrapper_around_what_a_scheduler_has_put_there_is_no_schedulers() -> None:
    optimizer = torch.optim.SGD(nn.Linear(2, 1).parameters(), lr=0.1)
    assert replaced_step(optimizer) is None
    ExponentialLR(optimizer, 0.9)
    assert replaced_step(optimizer) is None
    another_step(optimizer)
    assert replaced_step(optimizer) is not None


def state_that_was_loaded(servers: int) -> list[float]:
    """Goes on with an optimizer whose state the program has loaded from a file of its own."""
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    for scale in (1.0, 3.0):
        optimizer.zero_grad()
        (model(BATCH[0]) * scale).sum().backward()
        optimizer.step()
    cluster = Cluster(1, servers, "sync" if servers else None)
    made = lambda _: Session(model, nn.functional.mse_loss, optimizer, max_steps=3)  # noqa: E731

    def program(session: Session) -> list[float]:
        for _ in range(3):
            session.step(BATCH)
        found: list[float] = session.model.weight.flatten().tolist()
        return found

    return run_job(cluster, made, program).values[0]


@pytest.mark.parametrize("servers", [1, 2])
def test_servers_go_on_with_the_state_that_the_program_has_loaded(servers: int) -> None:
    assert state_that_was_loaded(servers) == pytest.approx(state_that_was_loaded(0), abs=1e-6)


def loop(change: str) -> list[str]:
    """Three steps of a loop of one's own; returns what its hooks have noted."""
    model, noted = nn.Linear(4, 1), list[str]()
    given = torch.optim.SGD(model.parameters(), lr=0.1)
    given.register_step_pre_hook(lambda *_: noted.append("before it was given"))
    optimizer = trireme.distribute(model, given)
    given.register_step_post_hook(lambda *_: noted.append("to the given one"))
    optimizer.register_step_post_hook(lambda *_: noted.append("to the returned one"))
    every = register_optimizer_step_pre_hook(lambda *_: noted.append("to all"))
    try:
        for step in range(2):
            optimizer.zero_grad()
            model(BATCH[0]).square().mean().backward()
            if step == 1 and change:
                {"clear": clear, "replace": replace}[change](optimizer)
            optimizer.step()
    except ConfigurationError as error:
        optimizer.worker.fail(error)
        return [str(error)]
    finally:
        every.remove()
    optimizer.close()
    return sorted(noted)


@pytest.mark.processes
@pytest.mark.parametrize("group", [ProcessGroup(), ProcessGroup(servers=1)], ids=["python", "ps"])
def test_a_loop_calls_all_hooks_whenever_they_came(group: ProcessGroup) -> None:
    names = ["before it was given", "to all", "to the given one", "to the returned one"]
    assert run_process_group(group, loop, "").values == [sorted(names * 2)]


@pytest.mark.processes
@pytest.mark.parametrize("change", ["clear", "replace"])
def test_a_loop_refuses_a_change_of_the_state(change: str) -> None:
    (told,) = run_process_group(ProcessGroup(servers=1), loop, change).values
    assert "changed the state of the optimizer SGD" in told[0]

"""Where a worker's periods end, of which examples a delta is, and who leaves which state when."""

from __future__ import annotations

from typing import Any, cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from trireme.averaging.backend import LocalSgd
from trireme.errors import CheckpointError
from trireme.ps.client.client import Client
from trireme.ps.flat import FlatModel
from trireme.ps.messages import Applied, OptimizerSpec, Span
from trireme.ps.results import PushResult
from trireme.ps.rule import Rule
from trireme.session.backends.base import joined_spans
from trireme.session.checkpoint import CheckpointData
from trireme.session.checkpoint.restored import JobState

EVERY = 2


class Board:
    """What a server of rounds of two is to them: what they left, and how far the rounds are."""

    def __init__(self) -> None:
        self.left: dict[str, dict[int, bytes]] = {}
        self.pushed: dict[int, set[int]] = {}

    def push(self, worker: int, step: int) -> None:
        self.pushed.setdefault(step, set()).add(worker)

    def closed(self, step: int) -> bool:
        return len(self.pushed[step]) == 2


class BoardClient(Client):
    """A client without servers; answers never come before the round is closed."""

    step = 0
    stopping = False

    def __init__(self, board: Board, worker: int, flat: FlatModel) -> None:
        self.board, self.worker = board, worker

    def attach(self, optimizer: OptimizerSpec, rule: Rule, tables: object = ()) -> bool:
        return True

    def pull(self, *, train: bool = True, at_least: int = 0) -> None:
        pass

    def check(self) -> None:
        pass

    def push(self, weight: float, **_: Any) -> None:
        self.board.push(self.worker, self.step)

    def wait(self) -> PushResult:
        assert self.board.closed(self.step)
        self.step += EVERY
        return PushResult(Applied(self.step), self.step, 0, False)

    def share(self, topic: str, data: bytes) -> None:
        self.board.left.setdefault(topic, {})[self.worker] = data

    def collect(self, topic: str) -> dict[int, bytes]:
        return dict(self.board.left.get(topic, {}))


class BoardSgd(LocalSgd, BoardClient):
    """Local SGD over that client."""


class Trainer:
    """A worker whose optimizer's state counts its steps."""

    def __init__(self, board: Board, worker: int) -> None:
        self.model = nn.Linear(1, 1, bias=False)
        self.flat = FlatModel([list(self.model.named_parameters())], servers=1)
        optimizer = torch.optim.SGD(self.model.parameters(), lr=0.5, momentum=1.0)
        self.backend = BoardSgd(cast(Any, board), cast(Any, worker), self.flat, optimizer)
        self.backend.start(cast(OptimizerSpec, None), Rule(0, 0, every=EVERY), lambda: None)

    def push(self, *, wants_save: bool = False) -> None:
        """Trains until there is something to wait for."""
        self.backend.wants_save = wants_save
        for _ in range(EVERY):
            assert self.backend.wait() is None
            self.flat.gradients[0].fill_(1.0)
            self.backend.push(1.0)

    def wait(self) -> bool:
        assert self.backend.wait() is not None
        return self.backend.saves


@settings(deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.booleans(), st.booleans()), min_size=2, max_size=8))
def test_all_leave_the_state_of_the_step_that_the_chief_saves(
    exchanges: list[tuple[bool, bool, bool]],
) -> None:
    """Each exchange: whether it is saved, who pushes first, and whether the other one is late.

    Late is who looks for the answer when the chief has pushed again, and asked for another save.
    """
    board = Board()
    chief, other = Trainer(board, 0), Trainer(board, 1)
    saved: int | None = None  # by the last exchange, and not looked at yet
    late: bool | None = None  # whether the other one has still to hear of the last, saved or not

    def hear() -> None:
        nonlocal late
        if late is not None:
            assert other.wait() == late
        late = None

    for number, (saves, chief_first, is_late) in enumerate(exchanges, 1):
        if not chief_first:
            hear()
            other.push()
        chief.push(wants_save=saves)
        if chief_first:
            hear()
            other.push()
        assert chief.wait() == saves
        if saved is not None:  # this exchange is over: all have left the one before
            left = chief.backend.states(saved)
            counted = {name: tensor.item() for name, tensor in left.items()}
            assert counted == {f"{w}/weight/momentum_buffer": float(saved) for w in (0, 1)}
        saved = number * EVERY if saves else None
        late = saves
        if not is_late:
            hear()


@pytest.mark.parametrize("name", ["x/w/step", "2/w/step", "-1/w/step", "01/w/step", "w"])
def test_the_optimizer_of_no_worker(name: str) -> None:
    data = CheckpointData(1, {}, local={"1/w/step": torch.tensor(3.0), name: torch.tensor(3.0)})
    then = JobState(applies="deltas", workers=2)
    with pytest.raises(CheckpointError, match=f"has state '{name}' of a worker's optimizer"):
        Trainer(Board(), 0).backend.hand_out_states(data, then, 2)


@given(st.integers(1, 20), st.integers(0, 100), st.integers(1, 100))
def test_synchronous_periods_lie_on_one_grid_and_end_at_the_end(
    every: int, begin: int, more: int
) -> None:
    step, end = begin, begin + more
    rule = Rule(0, 0, every=every, max_steps=end)
    ends = []
    while step < end:
        step += rule.steps_from(step)
        ends.append(step)
    assert ends[-1] == end
    assert ends[:-1] == [s for s in range(begin + 1, end) if s % every == 0]


@given(st.integers(1, 20), st.integers(0, 100))
def test_one_by_one_a_period_is_whole_wherever_it_begins(every: int, begin: int) -> None:
    assert Rule(1, 3, every=every).steps_from(begin) == every
    assert Rule(1, 3, every=every, max_steps=begin + 2).steps_from(begin) == min(every, 2)
    assert Rule(1, 3, every=every, max_steps=begin).steps_from(begin) == 1, (
        "who was let begin makes a step"
    )


@given(st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, 30)), unique=True, max_size=40))
def test_a_delta_names_its_examples_in_few_spans(batches: list[tuple[str, int]]) -> None:
    spans = joined_spans([Span(name, 4 * n, 4 * n + 4) for name, n in batches])
    covered = [(s.dataset, p) for s in spans for p in range(s.start, s.stop)]
    assert sorted(covered) == sorted((d, p) for d, n in batches for p in range(4 * n, 4 * n + 4))
    ends = {(span.dataset, span.stop) for span in spans}
    assert not ends & {(span.dataset, span.start) for span in spans}

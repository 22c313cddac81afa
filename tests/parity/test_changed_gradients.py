"""A loop of one's own that clips or scales gradients itself: as in one process, or it is told."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from tests.parity.loop import train_changing, train_hooked, train_scaled
from tests.parity.plain import Values, difference
from tests.parity.spread import STEPS
from tests.parity.test_distribute import CLOSE, WAYS
from tests.process_groups import run_process_group

pytestmark = [pytest.mark.processes, pytest.mark.timeout(400)]


def ran(way: str, program: Any, *args: Any) -> list[tuple[Values, dict[str, Any]]]:
    """What each process ends with: values, and what else the program returned."""
    found = run_process_group(WAYS[way], program, "MLP", *args).values
    own = ("said", "steps", "scale")
    return [
        (
            {n: torch.from_numpy(v) for n, v in values.items() if n not in own},
            {n: v for n, v in values.items() if n in own},
        )
        for values in found
    ]


@pytest.mark.thorough(but=("fsdp-norm",))
@pytest.mark.parametrize(
    ("way", "change"),
    [
        ("allreduce", "norm"),
        ("allreduce", "value"),  # which torch cannot clip of a DTensor
        ("fsdp", "norm"),
        ("dp=2,tp=2", "norm"),
        ("ps async over dp=2", "value"),
    ],
)
def test_gradients_averaged_before_the_loop_clips_them_are_those_of_one_process(
    way: str, change: str
) -> None:
    ((wanted, _),) = ran("python", train_changing, change)
    for values, rest in ran(way, train_changing, change):
        assert difference(values, wanted) <= CLOSE
        assert rest["said"] == []


@pytest.mark.parametrize(
    ("way", "together", "advice"),
    [
        ("allreduce", False, r"call optimizer\.synchronize\(\) right after backward"),
        ("ps sync", True, r"give distribute\(\.\.\., clip_norm=\.\.\.\)"),
    ],
)
def test_gradients_of_one_worker_are_said_once_with_the_line_and_the_option(
    way: str, together: bool, advice: str
) -> None:
    ((wanted, _),) = ran("python", train_changing, "norm")
    (values, chief), (_, other) = ran(way, train_changing, "norm", together)
    assert difference(values, wanted) > CLOSE  # it is no false alarm
    (said,) = chief["said"]
    assert "before the step at loop.py:" in said and re.search(advice, said)
    assert other["said"] == []


@pytest.mark.parametrize("way", ["allreduce", "ps sync"])
def test_hooks_that_change_gradients_are_said_once_and_those_that_look_are_not(way: str) -> None:
    (chief, other) = run_process_group(WAYS[way], train_hooked, "MLP", True).values
    (said,) = chief
    assert "has changed the gradients by a hook (register_hook)" in said and other == []
    assert run_process_group(WAYS[way], train_hooked, "MLP", False).values == [[], []]


def test_an_overflow_in_one_process_skips_the_step_of_all() -> None:
    ((wanted, alone),) = ran("python", train_scaled)
    for values, rest in ran("allreduce", train_scaled):
        assert difference(values, wanted) <= CLOSE
        assert rest == alone and rest["steps"] == STEPS - 1


@pytest.mark.parametrize("way", ["allreduce", "ps sync"])
def test_a_scaler_of_gradients_of_one_worker_is_said_once(way: str) -> None:
    (_, chief), (_, other) = ran(way, train_scaled, False, False)
    (said,) = chief["said"]
    assert "before the step at loop.py:" in said and "instead of a GradScaler" in said
    assert other["said"] == []

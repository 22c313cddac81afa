"""Narrow parameters whose updates are lost in rounding: one warning."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import trireme
from tests.process_groups import ProcessGroup, run_process_group

INPUTS = torch.linspace(-1, 1, 64).reshape(8, 8)


def warnings(dtype: str, lr: float, kind: str, steps: int = 12) -> list[str]:
    """What a session, or a loop of one's own, warns of."""
    torch.manual_seed(0)
    model = nn.Linear(8, 4).to(getattr(torch, dtype))
    inputs = INPUTS.to(getattr(torch, dtype))
    said: list[str] = []
    if kind == "loop":
        adam = torch.optim.Adam(model.parameters(), lr=lr)
        optimizer = trireme.distribute(model, adam)
        optimizer.worker.progress.warn = said.append  # type: ignore[method-assign]
        for _ in range(steps):
            optimizer.zero_grad()
            model(inputs).square().mean().backward()
            optimizer.step()
        optimizer.close()
        return said
    session = trireme.Session(
        model,
        lambda outputs, _: outputs.float().square().mean(),
        lambda params: torch.optim.Adam(params, lr=lr),
    )
    with session:
        session.worker.progress.warn = said.append  # type: ignore[method-assign]
        for _ in range(steps):
            session.step((inputs, inputs))
    return said


WAYS = {
    "alone": ProcessGroup(),
    "allreduce": ProcessGroup(workers=2),
    "fsdp": ProcessGroup(workers=2, strategy="fsdp"),
    "async": ProcessGroup(servers=1),
    "sync": ProcessGroup(servers=1, strategy="sync"),
    "averaging": ProcessGroup(servers=1, strategy="averaging", every=4),
}


@pytest.mark.parametrize("kind", ["session", "loop"])
@pytest.mark.parametrize("way", WAYS)
def test_updates_below_the_last_place_are_said_once(way: str, kind: str) -> None:
    first, *others = run_process_group(WAYS[way], warnings, "bfloat16", 1e-5, kind).values
    lost = [text for text in first if "did not change in update 10" in text]
    assert len(lost) == 1 and "the parameters are in bfloat16" in lost[0]
    assert not any("did not change" in text for said in others for text in said)


@pytest.mark.parametrize(("dtype", "lr"), [("bfloat16", 0.05), ("float32", 1e-5)])
def test_updates_that_count_are_not(dtype: str, lr: float) -> None:
    (said,) = run_process_group(ProcessGroup(), warnings, dtype, lr, "session").values
    assert not any("did not change" in text for text in said)


def test_a_hundred_updates_are_said_once_too() -> None:
    (said,) = run_process_group(ProcessGroup(), warnings, "bfloat16", 1e-5, "session", 120).values
    assert sum("did not change" in text for text in said) == 1

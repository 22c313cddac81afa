from __future__ import annotations

import pytest
import torch

from trireme.launch.config.task_config import GroupMember, TaskConfig
from trireme.session.model.building import device_of
from trireme.session.options import Options
from trireme.session.settings import Settings


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)


def chosen(task: TaskConfig, device: str | None = None) -> torch.device | None:
    return device_of(Settings(task, Options(device=device)))


@pytest.mark.usefixtures("two_gpus")
@pytest.mark.parametrize(("local_rank", "index"), [(0, 0), (1, 1), (2, 0), (3, 1)])
def test_processes_of_a_host_share_its_gpus_evenly(local_rank: int, index: int) -> None:
    together = TaskConfig(job="j", workers=4, group=GroupMember(size=4, local_rank=local_rank))
    apart = TaskConfig(job="j", workers=4, servers=1, group=GroupMember(local_rank=local_rank))
    assert chosen(together) == torch.device("cuda", index)
    assert chosen(together, "cuda") == chosen(apart, "cuda") == torch.device("cuda", index)


@pytest.mark.usefixtures("two_gpus")
def test_what_the_program_says_exactly_counts() -> None:
    task = TaskConfig(job="j", workers=2, group=GroupMember(size=2, local_rank=1))
    assert chosen(task, "cuda:0") == torch.device("cuda:0")
    assert chosen(task, "cpu") == torch.device("cpu")
    assert chosen(TaskConfig(job="j"), "cuda") == torch.device("cuda")
    assert chosen(TaskConfig(job="j")) is None


def test_without_gpus_the_model_stays_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert chosen(TaskConfig(job="j", workers=2, group=GroupMember(size=2))) is None

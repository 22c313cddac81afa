from __future__ import annotations

import pytest
import torch
from torch import nn

from trireme.job_config import JobConfig
from trireme.launch.config.task_config import GroupMember, TaskConfig
from trireme.session.options import Options
from trireme.session.settings import Settings
from trireme.session.worker.assembly import assemble
from trireme.session.worker.dry_run import describe


@pytest.mark.parametrize(
    ("strategy", "mesh", "processes", "servers", "lines"),
    [
        (None, "", 1, 0, ["strategy: Async", "a step sends nothing"]),
        (None, "", 2, 0, ["each of 2 processes holds everything", "averages 128 B"]),
        ("fsdp", "", 2, 0, ["split over 2 processes, by the mesh fsdp=2"]),
        ("tensor", "", 2, 0, ["by the mesh tp=2"]),
        ("async", "", 1, 1, ["256 slots over 1 server\n"]),
        ("async", "", 1, 2, ["256 slots over 2 servers\n", "  ps:1  slots 128-255"]),
    ],
)
def test_what_each_process_holds_and_sends(
    strategy: str | None, mesh: str, processes: int, servers: int, lines: list[str]
) -> None:
    config = JobConfig().replaced("a test", strategy=strategy, mesh=mesh, workers=2, ps=servers)
    group = GroupMember(size=processes)
    task = TaskConfig(job="j", workers=2, servers=servers, group=group, config=config, dry_run=True)
    if processes == 1 and not servers:
        task = TaskConfig(job="j", config=JobConfig(), dry_run=True)
    settings = Settings(task, Options())
    setup = assemble(
        settings, lambda: nn.Linear(4, 4), lambda params: torch.optim.SGD(params, lr=0.1)
    )
    described = describe(setup)
    for line in lines:
        assert line in described


def test_which_server_holds_which_copies() -> None:
    config = JobConfig().replaced("a test", strategy="async", workers=2, ps=3, replicas=2)
    task = TaskConfig(job="j", workers=2, servers=3, config=config, dry_run=True)
    setup = assemble(
        Settings(task, Options()),
        lambda: nn.Linear(4, 4),
        lambda params: torch.optim.SGD(params, lr=0.1),
    )
    described = describe(setup)
    assert "  ps:0  slots 0-84  " in described
    assert "; a copy on ps:1\n" in described
    assert "  ps:2  slots 170-255  " in described
    assert "; a copy on ps:0\n" in described

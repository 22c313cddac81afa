"""When training has ended, each worker's model holds the values of the last checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from tests.harness import Cluster, run_job
from trireme.session.checkpoint import latest
from trireme.session.session import Session

CLUSTERS = [
    Cluster(workers=2, servers=servers, strategy=strategy, staleness=staleness, prefetch=prefetch)
    for servers in (1, 2)
    for strategy, staleness in (("async", None), ("ssp", 2))
    for prefetch in (False, True)
] + [
    Cluster(workers=2, servers=2, strategy="async", prefetch=True, scheme="shm"),
    Cluster(workers=1, servers=2, strategy="async", prefetch=True, scheme="tcp"),
    Cluster(workers=2, servers=2, strategy="averaging", every=3, staleness=2),
    Cluster(workers=2, servers=2, strategy="sync"),
]


@pytest.mark.thorough
@pytest.mark.parametrize("cluster", CLUSTERS, ids=str)
def test_the_model_is_the_last_checkpoint_to_the_bit(cluster: Cluster, tmp_path: Path) -> None:
    torch.manual_seed(3)
    data = TensorDataset(torch.randn(60, 8), torch.randint(0, 2, (60,)))

    def session(worker: int) -> Session:
        torch.manual_seed(4)
        model = nn.Sequential(nn.Linear(8, 40), nn.Tanh(), nn.Linear(40, 2))
        return Session(
            model,
            nn.CrossEntropyLoss(),
            lambda parameters: torch.optim.Adam(parameters, lr=0.01),
            run_dir=tmp_path,
            max_steps=24,
        )

    def program(session: Session) -> tuple[int, dict[str, torch.Tensor]]:
        for batch in session.loader(data, 5):
            session.step(batch)
        values = {name: p.detach().clone() for name, p in session.model.named_parameters()}
        return session.global_step, values

    values = run_job(cluster, session, program).values
    checkpoint = latest(tmp_path, lambda path, error: None)
    assert checkpoint is not None
    for worker, (step, model) in enumerate(values):
        assert step == checkpoint.step
        for name, value in model.items():
            assert torch.equal(value, checkpoint.model[name]), f"{name} at worker:{worker}"

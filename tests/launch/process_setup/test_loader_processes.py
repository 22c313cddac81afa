from __future__ import annotations

import os
import signal

import psutil
import torch
from torch.utils.data import DataLoader, TensorDataset

from trireme.launch.process_setup.loader_processes import shield_loader_processes


class Owner:
    """Who wants it."""


def loaders(data: TensorDataset) -> tuple[DataLoader[tuple[torch.Tensor, ...]], Owner]:
    owner = Owner()
    shield_loader_processes(owner)
    return DataLoader(data, batch_size=1, num_workers=1, multiprocessing_context="fork"), owner


def test_loader_processes_outlive_a_signal_to_all_processes() -> None:
    loader, owner = loaders(TensorDataset(torch.arange(64)))
    batches = iter(loader)
    assert next(batches)[0].item() == 0
    (child,) = psutil.Process().children()
    somebody = os.fork()
    if not somebody:
        os.kill(child.pid, signal.SIGTERM)
        os.kill(child.pid, signal.SIGINT)
        os._exit(0)
    os.waitpid(somebody, 0)
    assert [batch[0].item() for batch in batches] == list(range(1, 64))
    del owner


def test_loader_processes_end_by_their_worker() -> None:
    loader, owner = loaders(TensorDataset(torch.arange(64)))
    batches = iter(loader)
    next(batches)
    (child,) = psutil.Process().children()
    child.terminate()
    assert child.wait(30) in (0, None)
    del owner

from __future__ import annotations

import os
import signal

import psutil
from torch.utils.data import DataLoader, Dataset

from trireme.launch.process_setup.loader_processes import shield_loader_processes


class Owner:
    """Who wants it."""


class Places(Dataset[tuple[int, int]]):
    """Each number, and the process that has made it: this one may have other children too."""

    def __getitem__(self, index: int) -> tuple[int, int]:
        return index, os.getpid()

    def __len__(self) -> int:
        return 64


def loaders() -> tuple[DataLoader[tuple[int, int]], Owner]:
    owner = Owner()
    shield_loader_processes(owner)
    return DataLoader(Places(), batch_size=1, num_workers=1, multiprocessing_context="fork"), owner


def test_loader_processes_outlive_a_signal_to_all_processes() -> None:
    loader, owner = loaders()
    batches = iter(loader)
    first, child = next(batches)
    assert first.item() == 0
    somebody = os.fork()
    if not somebody:
        os.kill(child.item(), signal.SIGTERM)
        os.kill(child.item(), signal.SIGINT)
        os._exit(0)
    os.waitpid(somebody, 0)
    assert [index.item() for index, _ in batches] == list(range(1, 64))
    del owner


def test_loader_processes_end_by_their_worker() -> None:
    loader, owner = loaders()
    batches = iter(loader)
    _, pid = next(batches)
    child = psutil.Process(pid.item())
    child.terminate()
    assert child.wait(30) in (0, None)
    del owner

from __future__ import annotations

import os
import signal
import subprocess

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


class Decoded(Places):
    """What a program of its own is needed for, which is ended by SIGTERM."""

    def __getitem__(self, index: int) -> tuple[int, int]:
        with subprocess.Popen(["sleep", "60"]) as program:
            program.terminate()
            try:
                return index, program.wait(20)
            except subprocess.TimeoutExpired:
                program.kill()
                return index, program.wait()


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


def test_programs_that_a_data_set_starts_end_by_a_signal_as_usual() -> None:
    owner = Owner()
    shield_loader_processes(owner)
    loader = DataLoader(Decoded(), batch_size=1, num_workers=1, multiprocessing_context="fork")
    batches = iter(loader)
    assert next(batches)[1].item() == -signal.SIGTERM
    del batches, owner

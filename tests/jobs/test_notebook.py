"""Jobs from a notebook: a real kernel, which executes cells and is interrupted."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path

import nbformat
import pytest
from jupyter_client.blocking.client import BlockingKernelClient
from jupyter_client.manager import KernelManager
from nbclient import NotebookClient

from tests.conftest import PYTHONPATH, ROOT

pytestmark = [pytest.mark.thorough, pytest.mark.processes]

CELL = """
import trireme

def train():
    import torch
    from torch import nn
    from torch.utils.data import TensorDataset
    data = TensorDataset(torch.zeros(64, 4), torch.zeros(64, 1))
    session = trireme.Session(
        nn.Linear(4, 1), nn.MSELoss(), lambda p: torch.optim.SGD(p, lr=0.1), max_steps=10**8
    )
    with session:
        for batch in session.loader(data, batch_size=16):
            session.step(batch)

trireme.run(train, workers=1, run_dir="run")
"""


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Kernels import this clone, and stand in a directory of their own."""
    path = os.pathsep.join([PYTHONPATH, os.environ.get("PYTHONPATH", "")])
    monkeypatch.setenv("PYTHONPATH", path)
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    monkeypatch.setenv("JUPYTER_PLATFORM_DIRS", "1")
    for name in [name for name in os.environ if name.startswith("TRIREME_")]:
        monkeypatch.delenv(name)


@pytest.mark.slow
def test_the_example_runs_as_written(tmp_path: Path) -> None:
    notebook = nbformat.read(ROOT / "examples" / "notebook.ipynb", as_version=4)
    assert not any(cell.get("outputs") for cell in notebook.cells)
    client = NotebookClient(
        notebook, timeout=240, kernel_name="python3", resources={"metadata": {"path": tmp_path}}
    )
    client.execute()
    texts = [
        output.get("text", "") + output.get("data", {}).get("text/plain", "")
        for cell in notebook.cells
        for output in cell.get("outputs", ())
    ]
    # A server tells its state twice a second: a quick job is past step 100 before it serves.
    assert any(text.startswith("running {'ps:0': ") for text in texts)
    assert any("was stopped at global step" in text for text in texts)
    assert any(text.startswith("accuracy 0.9") for text in texts)
    assert any("<Figure" in text for text in texts)


@pytest.fixture
def kernel(tmp_path: Path) -> Iterator[tuple[KernelManager, BlockingKernelClient]]:
    """A kernel, and a client of it."""
    manager = KernelManager(kernel_name="python3")
    manager.start_kernel(cwd=str(tmp_path))
    client = manager.blocking_client()
    client.start_channels()
    try:
        client.wait_for_ready(timeout=120)
        yield manager, client
    finally:
        client.stop_channels()
        manager.shutdown_kernel(now=True)


def test_an_interrupt_of_the_kernel_stops_the_job_which_saves(
    kernel: tuple[KernelManager, BlockingKernelClient], tmp_path: Path
) -> None:
    manager, client = kernel
    asked = client.execute(CELL)
    log = tmp_path / "run" / "logs" / "worker-0.log"
    deadline = time.monotonic() + 120
    while not (log.exists() and "training" in log.read_text()):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    manager.interrupt_kernel()
    message = client.get_shell_msg(timeout=120)
    while message["parent_header"].get("msg_id") != asked:  # an answer of the kernel's start
        message = client.get_shell_msg(timeout=120)
    reply = message["content"]
    assert (reply["status"], reply["ename"]) == ("error", "KeyboardInterrupt")
    assert "has saved; the same call goes on from there" in reply["evalue"]
    assert list((tmp_path / "run" / "checkpoints").glob("step-*"))

"""The same through the whole of it: `trireme run`, processes, the loader that deals examples."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors.torch import load_file
from torch.utils.data import TensorDataset

from tests.integration.conftest import clean_shell
from tests.parity.lenet import BATCH, STEPS, network
from tests.parity.plain import Problem, Values, difference, train
from tests.parity.problems import same_everywhere, sgd
from trireme.data.order import Order

pytestmark = [pytest.mark.processes, pytest.mark.timeout(600)]

PROGRAM = Path(__file__).parent / "programs" / "lenet.py"


@pytest.fixture(scope="module")
def expected(images: TensorDataset) -> Values:
    """What one plain process makes of the same examples in the same order."""
    order = Order(len(images))
    chosen = [order.indices(BATCH * step, BATCH * (step + 1)) for step in range(STEPS)]
    inputs, targets = images.tensors
    problem = Problem(network(images, smooth=True), [(inputs[i], targets[i]) for i in chosen])
    return train(problem, sgd(lr=0.01)).values


@pytest.mark.thorough
@pytest.mark.slow(but=("async-1-1",))
@pytest.mark.parametrize(("strategy", "servers", "workers"), [("sync", 2, 2), ("async", 1, 1)])
def test_a_job_of_processes_equals_one_process(
    strategy: str,
    servers: int,
    workers: int,
    expected: Values,
    image_folder: Path | None,
    tmp_path: Path,
) -> None:
    with clean_shell(tmp_path) as shell:
        data = () if image_folder is None else ("--data-dir", image_folder)
        ended = shell.run(
            *("run", "--ps", servers, "--workers", workers, "--strategy", strategy),
            *(PROGRAM, "--out", "out", "--batch-size", BATCH // workers, *data),
        )
        assert ended.status == 0, ended.text
    found = [load_file(tmp_path / f"out/{worker}.safetensors") for worker in range(workers)]
    assert difference(same_everywhere(found), expected) <= 1e-5

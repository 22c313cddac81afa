"""Which optimizers have kernels of their own; test_optim.py compares what they compute."""

from __future__ import annotations

from trireme.kernels.fused import DIRECT
from trireme.ps.optimizers import OPTIMIZERS


def test_these_of_torchs_optimizers_have_kernels_of_their_own() -> None:
    assert set(DIRECT) == {"Adam", "AdamW", "SGD", "Adagrad"}
    assert set(DIRECT) <= set(OPTIMIZERS)

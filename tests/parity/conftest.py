"""What tests of parity share."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch.utils.data import TensorDataset

from tests.conftest import real_data
from tests.parity.lenet import images as load_images


@pytest.fixture(scope="session")
def image_folder() -> Path | None:
    """Where MNIST is; None where it is not."""
    try:
        return real_data("mnist")
    except pytest.skip.Exception:
        return None


@pytest.fixture(scope="session")
def images(image_folder: Path | None) -> TensorDataset:
    """MNIST where it is, else the digits of scikit-learn."""
    return load_images(image_folder)

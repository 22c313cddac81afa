"""The networks that examples, tests and benchmarks share. They know nothing of parallelism."""

from __future__ import annotations

from trireme.models.image_networks import MLP, CifarNetwork, DigitsNetwork, LeNet5

__all__ = ["MLP", "CifarNetwork", "DigitsNetwork", "LeNet5"]

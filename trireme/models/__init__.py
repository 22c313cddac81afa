"""The networks that examples, tests and benchmarks share. They know nothing of parallelism."""

from __future__ import annotations

from trireme.models.cifar_network import CifarNetwork
from trireme.models.digits_network import DigitsNetwork
from trireme.models.lenet import LeNet5
from trireme.models.lstm import LSTMLanguageModel
from trireme.models.mlp import MLP
from trireme.models.transformer import Transformer

__all__ = ["MLP", "CifarNetwork", "DigitsNetwork", "LSTMLanguageModel", "LeNet5", "Transformer"]

"""Five models with branches, each with an expert's placement for two tasks, and a transformer.

A step of each takes 50 to 200 ms on one core. They have no batch normalization, so that their
batches can be divided into micro-batches.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from benchmarks.programs.networks import make_network
from benchmarks.programs.task import NETWORKS, TIME, VOCABULARY

FIRST, SECOND = "worker:0", "worker:1"


@dataclass(frozen=True)
class Branched:
    """A model to place.

    Attributes:
        title: a short description of the model, for tables.
        make: makes the model.
        batch: makes the arguments of the model, and the targets.
        loss: (outputs, targets) -> the mean loss.
        expert: where somebody who knows the model would place it: pattern of the name of a module
            -> device; the first pattern that matches decides.
    """

    title: str
    make: Callable[[], nn.Module]
    batch: Callable[[], tuple[tuple[torch.Tensor, ...], torch.Tensor]]
    loss: Callable[[Any, Any], torch.Tensor]
    expert: Mapping[str, str]


def _conv(inputs: int, outputs: int, size: int = 3) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(inputs, outputs, size, padding=size // 2), nn.ReLU())


class InceptionBlock(nn.Module):
    """Four branches that see the same image, joined by channels.

    C. Szegedy et al., "Going Deeper with Convolutions" (CVPR 2015), figure 2 (b).
    """

    def __init__(self, inputs: int, width: int) -> None:
        super().__init__()
        self.narrow = _conv(inputs, width, 1)
        self.middle = nn.Sequential(_conv(inputs, width, 1), _conv(width, 2 * width))
        self.wide = nn.Sequential(_conv(inputs, width // 2, 1), _conv(width // 2, width, 5))
        self.pooled = nn.Sequential(nn.MaxPool2d(3, 1, 1), _conv(inputs, width, 1))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Returns images of five times the width."""
        branches = (self.narrow, self.middle, self.wide, self.pooled)
        return torch.cat([branch(images) for branch in branches], 1)


class Inception(nn.Module):
    """A stem, three Inception blocks, and a classifier. Takes images of 3 x 32 x 32."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.stem = nn.Sequential(_conv(3, 32), nn.MaxPool2d(2))
        self.block_0 = InceptionBlock(32, width)
        self.block_1 = InceptionBlock(5 * width, width)
        self.block_2 = InceptionBlock(5 * width, width)
        self.head = nn.Linear(5 * width, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Returns logits of shape (N, 10)."""
        values = self.block_2(self.block_1(self.block_0(self.stem(images))))
        logits: torch.Tensor = self.head(values.mean((2, 3)))
        return logits


class UNet(nn.Module):
    """Down to a quarter of the size and up again, with a skip at each size.

    O. Ronneberger et al., "U-Net" (MICCAI 2015), with two levels. Takes images of 3 x 48 x 48.
    """

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.down_0 = nn.Sequential(_conv(3, width), _conv(width, width))
        self.down_1 = nn.Sequential(_conv(width, 2 * width), _conv(2 * width, 2 * width))
        self.bottom = nn.Sequential(_conv(2 * width, 4 * width), _conv(4 * width, 4 * width))
        self.rise_1 = nn.ConvTranspose2d(4 * width, 2 * width, 2, 2)
        self.up_1 = nn.Sequential(_conv(4 * width, 2 * width), _conv(2 * width, 2 * width))
        self.rise_0 = nn.ConvTranspose2d(2 * width, width, 2, 2)
        self.up_0 = nn.Sequential(_conv(2 * width, width), _conv(width, width))
        self.head = nn.Conv2d(width, 4, 1)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Returns the logits of four classes for each pixel."""
        large = self.down_0(images)
        small = self.down_1(F.max_pool2d(large, 2))
        risen = self.rise_1(self.bottom(F.max_pool2d(small, 2)))
        risen = self.rise_0(self.up_1(torch.cat([small, risen], 1)))
        logits: torch.Tensor = self.head(self.up_0(torch.cat([large, risen], 1)))
        return logits


class TwoTower(nn.Module):
    """The score of pairs of an image and a text: the product of what two towers make of them.

    As in P.-S. Huang et al., "Learning Deep Structured Semantic Models" (CIKM 2013).
    """

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.image = nn.Sequential(
            _conv(3, 32), nn.MaxPool2d(2), _conv(32, width), _conv(width, width), nn.MaxPool2d(2)
        )
        self.image_out = nn.Linear(width, width)
        self.words = nn.Embedding(2000, 128)
        self.text = nn.Sequential(
            nn.Linear(128, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 512)
        )
        self.text_out = nn.Linear(512, width)

    def forward(self, images: torch.Tensor, texts: torch.Tensor) -> torch.Tensor:
        """Returns a score for each pair, of shape (N,)."""
        image = self.image_out(self.image(images).mean((2, 3)))
        text = self.text_out(F.relu(self.text(self.words(texts))).mean(1))
        return (image * text).sum(1)


class Translator(nn.Module):
    """LSTM encoders in both directions, and an LSTM decoder that attends to what they return.

    D. Bahdanau et al., "Neural Machine Translation by Jointly Learning to Align and Translate"
    (ICLR 2015), with attention after the decoder, as M.-T. Luong et al. (EMNLP 2015) have it.
    """

    def __init__(self, vocabulary: int = 1000, width: int = 128) -> None:
        super().__init__()
        self.source = nn.Embedding(vocabulary, width)
        self.forwards = nn.LSTM(width, width, batch_first=True)
        self.backwards = nn.LSTM(width, width, batch_first=True)
        self.target = nn.Embedding(vocabulary, width)
        self.decoder = nn.LSTM(width, 2 * width, batch_first=True)
        self.attended = nn.Linear(4 * width, 2 * width)
        self.head = nn.Linear(2 * width, vocabulary)

    def forward(self, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        """Returns logits of shape (N, time, vocabulary)."""
        words = self.source(source)
        one = self.forwards(words)[0]
        other = self.backwards(words.flip(1))[0].flip(1)
        memory = torch.cat([one, other], 2)
        states = self.decoder(self.target(target))[0]
        read = F.scaled_dot_product_attention(states, memory, memory)
        logits: torch.Tensor = self.head(torch.tanh(self.attended(torch.cat([states, read], 2))))
        return logits


class Mixture(nn.Module):
    """Four experts, each a network of two layers, mixed by a gate that sees the same input.

    R. Jacobs et al., "Adaptive Mixtures of Local Experts" (Neural Computation, 1991).
    """

    def __init__(self, width: int = 256, hidden: int = 1024) -> None:
        super().__init__()
        self.stem = nn.Linear(width, width)
        self.gate = nn.Linear(width, 4)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, width))
            for _ in range(4)
        )
        self.head = nn.Linear(width, 10)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """Returns logits of shape (N, 10)."""
        values = F.relu(self.stem(values))
        shares = self.gate(values).softmax(1)
        mixed = sum(
            shares[:, number : number + 1] * expert(values)
            for number, expert in enumerate(self.experts)
        )
        logits: torch.Tensor = self.head(mixed)
        return logits


def _images(count: int, size: int) -> torch.Tensor:
    return torch.randn(count, 3, size, size)


def _classes(*shape: int, most: int = 10) -> torch.Tensor:
    return torch.randint(most, shape)


def _token_loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


BRANCHED = {
    "inception": Branched(
        "Inception-like, 3 blocks of 4 branches",
        Inception,
        lambda: ((_images(32, 32),), _classes(32)),
        F.cross_entropy,
        {"*.middle": FIRST, "*.wide": SECOND, "*.narrow": SECOND, "*.pooled": SECOND, "*": FIRST},
    ),
    "u-net": Branched(
        "U-Net of two levels",
        UNet,
        lambda: ((_images(16, 48),), _classes(16, 48, 48, most=4)),
        F.cross_entropy,
        {"down_*": FIRST, "bottom": FIRST, "*": SECOND},
    ),
    "two-tower": Branched(
        "two towers, images and texts",
        TwoTower,
        lambda: ((_images(48, 32), _classes(48, 40, most=2000)), torch.rand(48)),
        F.binary_cross_entropy_with_logits,
        {"image*": FIRST, "words": SECOND, "text*": SECOND, "*": FIRST},
    ),
    "translator": Branched(
        "LSTM encoders and decoder with attention",
        Translator,
        lambda: ((_classes(32, 24, most=1000), _classes(32, 24, most=1000)),
                 _classes(32, 24, most=1000)),
        _token_loss,
        {"source": FIRST, "forwards": FIRST, "backwards": FIRST, "*": SECOND},
    ),
    "mixture": Branched(
        "mixture of four experts",
        Mixture,
        lambda: ((torch.randn(512, 256),), _classes(512)),
        F.cross_entropy,
        {"experts.2": SECOND, "experts.3": SECOND, "*": FIRST},
    ),
}  # fmt: skip
"""The models by name."""

TRANSFORMER = Branched(
    NETWORKS["transformer"].title,
    lambda: make_network("transformer"),
    lambda: (
        (_classes(NETWORKS["transformer"].batch, TIME, most=VOCABULARY),),
        _classes(NETWORKS["transformer"].batch, TIME, most=VOCABULARY),
    ),
    _token_loss,
    {"embedding": FIRST, "block_0": FIRST, "block_1": FIRST, "block_2": FIRST, "*": SECOND},
)
"""A chain, which a pipeline can split too."""

PLACED = {**BRANCHED, "transformer": TRANSFORMER}
"""All of them by name."""

"""Language models: what every mode makes of them is what one process makes of them.

The LSTM carries its state from batch to batch, so here it matters who reads what: the lanes of a
worker must go on in its next batch, as those of the whole batch do in one process.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from language.networks import LSTMLanguageModel, Transformer
from language.text import TextWindows
from torch import nn
from torch.nn import functional as F

from tests.harness import Cluster, run_job
from tests.parity.plain import Values, difference, values_of
from tests.parity.problems import EXACT, same_everywhere
from trireme.session.session import Session

WORDS, LENGTH, LANES, EPOCHS = 13, 5, 12, 2
CLUSTERS = {
    "alone": Cluster(1, 0),
    "async": Cluster(1, 1, "async"),
    "sync of two": Cluster(2, 2, "sync"),
    "sync of three": Cluster(3, 1, "sync"),
}


def lstm() -> nn.Module:
    torch.manual_seed(0)
    return LSTMLanguageModel(WORDS, 6, 2, carry=True).double()


def transformer() -> nn.Module:
    torch.manual_seed(0)
    return Transformer(WORDS, 8, 2, 2, LENGTH).double()


def corpus() -> TextWindows:
    """A text that can be learned: each word says what follows it, but for some noise."""
    generator = torch.Generator().manual_seed(1)
    steps = 1 + torch.randint(2, (LANES * LENGTH * 9,), generator=generator)
    return TextWindows(steps.cumsum(0) % WORDS, LENGTH, LANES)


def cross_entropy(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def plain(model: nn.Module) -> Values:
    """One process reads all lanes, in the most ordinary way."""
    windows = corpus()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for _ in range(EPOCHS):
        if isinstance(model, LSTMLanguageModel):
            model.reset_state()
        for inputs, targets in zip(*(t.split(LANES) for t in windows.tensors), strict=True):
            optimizer.zero_grad()
            cross_entropy(model(inputs), targets).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.25)
            optimizer.step()
    return values_of(model)


@pytest.mark.thorough
@pytest.mark.parametrize("build", [lstm, transformer])
@pytest.mark.parametrize("cluster", CLUSTERS.values(), ids=CLUSTERS)
def test_the_lanes_of_all_workers_are_those_of_one_process(
    build: Callable[[], nn.Module], cluster: Cluster
) -> None:
    windows = corpus()
    first = build()

    def make(worker: int) -> Session:
        return Session(
            copy.deepcopy(first),
            cross_entropy,
            lambda params: torch.optim.SGD(params, lr=0.5),
            max_steps=EPOCHS * windows.steps,
            clip_norm=0.25,
        )

    def program(session: Session) -> Values:
        before = None
        for batch in session.loader(windows, LANES // cluster.workers, shuffle=False):
            if build is lstm and not windows.follows(before, batch.spans[0]):
                session.model.reset_state()
            before = batch.spans[0]
            session.step(batch)
        return values_of(session.model)

    wanted = plain(build())
    found = same_everywhere(run_job(cluster, make, program).values)
    assert difference(values_of(first), wanted) > 0.05, "nothing was learned"
    assert difference(found, wanted) < EXACT

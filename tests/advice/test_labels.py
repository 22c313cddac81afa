"""Labels that a loss leaves out, and a program that does not say so: one warning."""

from __future__ import annotations

from unittest import mock

import pytest
import torch

from tests.parity.test_token_means import BATCH, Language, Texts, token_mean, tokens
from tests.process_groups import ProcessGroup, run_process_group
from trireme.session.session import Session

pytestmark = [pytest.mark.processes, pytest.mark.timeout(300)]


def test_labels_that_a_loss_of_ones_own_leaves_out_are_noticed_once(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for weight, times in ((None, 1), (tokens, 0)):
        capsys.readouterr()
        torch.manual_seed(0)
        model = Language()
        optimizer = torch.optim.SGD(model.parameters(), 0.5)
        with Session(model, token_mean, optimizer, weight=weight) as session:
            for batch in session.loader(Texts(), BATCH, epochs=1):
                session.step(batch)
        assert capsys.readouterr().out.count("targets are -100") == times


def labels_left_out_late() -> list[str]:
    """Returns the warnings of a worker whose second batch is the first with labels of -100."""
    lines: list[str] = []
    torch.manual_seed(0)
    model, texts = Language(), Texts()
    sgd = torch.optim.SGD(model.parameters(), 0.5)
    with (
        Session(model, token_mean, sgd, max_steps=4) as session,
        mock.patch.object(session.worker.progress, "warn", lines.append),
    ):
        for step in range(4):
            labels = texts.labels[:4] if step else texts.ids[:4]
            session.step((texts.ids[:4], labels))
    return [line for line in lines if "targets are -100" in line]


@pytest.mark.thorough
def test_the_chief_alone_says_so_once() -> None:
    chief, other = run_process_group(ProcessGroup(workers=2), labels_left_out_late).values
    assert (len(chief), other) == (1, [])

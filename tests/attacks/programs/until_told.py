"""Trains until there is a file OUT/enough, and writes down what became of each push.

until_told.py OUT [STEP]    stops itself (SIGSTOP) with the push of so manieth step in flight
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from torch import nn

import trireme
from tests.faults import Fault, Faults
from trireme.ps.messages import Applied


def main() -> None:
    out = Path(sys.argv[1])
    faults = [Fault(0, int(step), "in flight", "hang") for step in sys.argv[2:]]
    session = trireme.Session(
        lambda: nn.Linear(4, 2),
        nn.CrossEntropyLoss(),
        lambda parameters: torch.optim.SGD(parameters, lr=0.01),
        max_steps=10**9,
        checkpoint=None,
        hooks=[Faults(faults, out)],
        log_every=10,
    )
    batch = torch.ones(8, 4), torch.zeros(8, dtype=torch.int64)
    verdicts = []
    with session:
        while not (out / "enough").exists():
            verdicts.append(session.step(batch).verdict)
    applied = [verdict.step for verdict in verdicts if isinstance(verdict, Applied)]
    report = {"pushes": len(verdicts), "applied": applied, "global_step": session.global_step}
    (out / "report.json").write_text(json.dumps(report))


main()

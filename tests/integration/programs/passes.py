"""Makes passes over data sets, and says what it was handed; CASE is what it does with it."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

import trireme

SIZE, BATCH, EPOCHS = 42, 8, 2
CASE = sys.argv[1]


def main() -> None:
    """Trains, and prints each example of a step, and what the model comes to."""
    torch.manual_seed(0)
    session = trireme.Session(
        nn.Linear(1, 1), nn.functional.mse_loss, lambda params: torch.optim.SGD(params, lr=1e-5)
    )
    data = TensorDataset(torch.arange(float(SIZE)).unsqueeze(1), torch.zeros(SIZE, 1))
    found: list[int] = []
    with session:
        # Asynchronous workers have whole batches, of any size.
        batch_size = BATCH // session.batches_per_step
        if CASE == "break":
            batches = session.loader(data, batch_size, epochs=1)
            for number, batch in enumerate(batches):
                if session.task.index == 1 and number == 1:
                    break
                session.step(batch)
                found += _examples(batch)
        elif CASE == "leaves-out":
            for _ in session.epochs(EPOCHS):
                for number, batch in enumerate(session.loader(data, batch_size)):
                    if not (session.task.index == 0 and number == 1):
                        session.step(batch)
                        found += _examples(batch)
        else:
            for number, batch in enumerate(session.loader(data, batch_size, epochs=EPOCHS)):
                if CASE == "skips" and number % 3 == 2:
                    continue
                for _ in range(2):
                    session.step(batch)
                found += _examples(batch)
            for _ in session.epochs(1, name="second"):
                for batch in session.loader(data, batch_size, name="second"):
                    session.step(batch)
        session.job.end()
        loss = session.evaluate(data)["loss"]
        print(f"had {found}; loss {loss:.9f} at {session.global_step}.", flush=True)


def _examples(batch: Any) -> list[int]:
    return [int(number) for number in batch[0][:, 0].tolist()] if batch.spans else []


main()

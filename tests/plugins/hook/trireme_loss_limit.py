"""`--loss-limit LOSS`: a job ends with an error once its loss is above a limit."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trireme.job_config import Option
from trireme.launch.hooks import LaunchHook

if TYPE_CHECKING:
    from trireme.session.hooks import Hook


def limit(loss: float) -> Hook:
    from trireme.session.hooks import Hook  # imports PyTorch, which `trireme run --help` does not

    class Limit(Hook):
        def after_step(self, session, result) -> None:
            if result.loss > loss:
                raise RuntimeError(f"the loss {result.loss:.3g} is above --loss-limit {loss:g}")

    return Limit()


LOSS_LIMIT = LaunchHook(
    Option("LOSS", "end the job once the loss is above LOSS", type=float),
    "trireme_loss_limit:limit",
)

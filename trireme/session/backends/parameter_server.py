"""Training by parameter servers: pushes gradients, and receives new values in the answer."""

from __future__ import annotations

from trireme.ps.client.client import Client
from trireme.ps.messages import OptimizerSpec
from trireme.ps.rule import Rule
from trireme.session.backends.base import Backend, FirstState


class ParameterServer(Client, Backend):
    """The backend of parameter servers; see `Client` for the arguments."""

    # Why this worker has asked for the job's end, which is lost with all copies of shard 0.
    _stop_reason: str | None = None

    def start(self, optimizer: OptimizerSpec, rule: Rule, first: FirstState) -> None:
        loaded = self.attach(optimizer, rule, self.tables)
        state = None if loaded else first()
        if state is not None:
            self.load(state)
        if self._stop_reason is not None:
            super().stop(self._stop_reason)
        self.pull()

    def stop(self, reason: str) -> int:
        self._stop_reason = reason
        return super().stop(reason)

    def come_back(self, incarnation: int) -> None:
        if incarnation > self.options.incarnation:
            self.renew(incarnation)

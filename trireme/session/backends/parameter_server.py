"""Training by parameter servers: pushes gradients, and receives new values in the answer."""

from __future__ import annotations

from trireme.ps.client.client import Client
from trireme.ps.messages import OptimizerSpec
from trireme.ps.rule import Rule
from trireme.session.backends.base import Backend, FirstState


class ParameterServer(Client, Backend):
    """The backend of parameter servers; see `Client` for the arguments."""

    def start(self, optimizer: OptimizerSpec, rule: Rule, first: FirstState) -> None:
        loaded = self.attach(optimizer, rule)
        state = None if loaded else first()
        if state is not None:
            self.load(state)
        self.pull()

    def come_back(self, incarnation: int) -> None:
        if incarnation > self.options.incarnation:
            self.renew(incarnation)

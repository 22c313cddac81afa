"""Which of several optimizers makes the next step, and which parameters it leaves alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import nn

from trireme.errors import ConfigurationError
from trireme.ps.joint import JointOptimizer
from trireme.session.assembly import Assembly
from trireme.session.rules import Optimizers

__all__ = ["Choice", "agree_on_optimizer", "choose"]


class Choice:
    """Several optimizers, of which one at a time makes a step.

    Args:
        joint: all of them.
        names: what a program calls each.
        parameters: for each, those with which the program computes.
    """

    def __init__(
        self,
        joint: JointOptimizer,
        names: Sequence[str | int],
        parameters: Sequence[Sequence[nn.Parameter]],
    ) -> None:
        self._joint = joint
        self._places = {name: place for place, name in enumerate(names)}
        self._parameters = parameters

    @classmethod
    def of(cls, made: Assembly, given: Optimizers) -> Choice | None:
        """Returns the choice among what a program gave as its optimizers; None of one."""
        joint = made.optimizer
        if not isinstance(joint, JointOptimizer):
            return None
        named = list(given) if isinstance(given, Mapping) else range(len(joint.optimizers))
        return cls(joint, named, made.parameters_of_each())

    @property
    def names(self) -> str:
        """The names, for a message."""
        return ", ".join(repr(name) for name in self._places)

    def choose(self, name: str | int | None) -> None:
        """Has one make the next step.

        Raises:
            ConfigurationError: there is none of that name.
        """
        if name is None or name not in self._places:
            wrong = "say which optimizer" if name is None else f"there is no optimizer {name!r}"
            raise ConfigurationError(f"step(batch, optimizer=...): {wrong}: one of {self.names}")
        self._joint.chosen = self._places[name]

    def others(self) -> list[nn.Parameter]:
        """Returns the parameters that the chosen one does not update."""
        return [
            parameter
            for place, own in enumerate(self._parameters)
            if place != self._joint.chosen
            for parameter in own
        ]

    def leave_out_others(self) -> None:
        """Forgets the gradients of the parameters that the chosen one does not update."""
        for parameter in self.others():
            parameter.grad = None


def choose(choice: Choice | None, name: str | int | None) -> None:
    """Has the optimizer of a name make the next step.

    Raises:
        ConfigurationError: there is none of that name, or no choice.
    """
    if choice is None:
        raise ConfigurationError(
            f"step(batch, optimizer={name!r}): this session has one optimizer; give it several by "
            "name, in a dict"
        )
    choice.choose(name)


def agree_on_optimizer(made: Assembly, *, takes_part: bool = True) -> None:
    """Checks that all processes that step together step the same one of several optimizers.

    Args:
        made: what they train; nothing is asked where one process or one optimizer trains it.
        takes_part: whether this one has chosen; if not, it takes what the others have.

    Raises:
        ConfigurationError: they do not.
    """
    joint, gang = made.optimizer, made.gang
    if not isinstance(joint, JointOptimizer) or gang is None:
        return
    chosen = float(joint.chosen)
    said = [chosen, chosen**2, 1.0] if takes_part else [0.0, 0.0, 0.0]
    total, squares, count = gang.total(said)()
    if total**2 != squares * count:
        raise ConfigurationError(
            f"rank {gang.rank} makes a step of optimizer {joint.chosen}, and another process of "
            "another: every process must step the same optimizers in the same order"
        )
    joint.chosen = round(total / count)

"""The choice among several optimizers, of which one makes the next step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import nn

from trireme.errors import ConfigurationError
from trireme.ps.joint_optimizer import JointOptimizer
from trireme.session.replica.assembly import Optimizers
from trireme.session.training_setup import TrainingSetup

__all__ = ["OptimizerChoice", "agree_on_optimizer"]


class OptimizerChoice:
    """Several optimizers, of which one at a time makes a step.

    Args:
        joint: the joint optimizer of all.
        names: the name or index of each optimizer.
        parameters: the parameters of each, as the program computes with them.
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
    def of(cls, setup: TrainingSetup, given: Optimizers) -> OptimizerChoice | None:
        """Returns the choice among a program's optimizers; None for a single optimizer."""
        joint = setup.optimizer
        if not isinstance(joint, JointOptimizer):
            return None
        named = list(given) if isinstance(given, Mapping) else range(len(joint.optimizers))
        return cls(joint, named, setup.parameters_of_each())

    def choose(self, name: str | int | None) -> None:
        """Chooses the optimizer that makes the next step.

        Raises:
            ConfigurationError: there is no optimizer of that name.
        """
        if name is None or name not in self._places:
            wrong = "say which optimizer" if name is None else f"there is no optimizer {name!r}"
            names = ", ".join(map(repr, self._places))
            raise ConfigurationError(f"step(batch, optimizer=...): {wrong}: one of {names}")
        self._joint.chosen = self._places[name]

    def leave_out_others(self) -> None:
        """Drops the gradients of the parameters that the chosen optimizer does not update."""
        for place, parameters in enumerate(self._parameters):
            if place != self._joint.chosen:
                for parameter in parameters:
                    parameter.grad = None


def agree_on_optimizer(setup: TrainingSetup, *, takes_part: bool = True) -> None:
    """Checks that all processes that step together step the same one of several optimizers.

    Args:
        setup: what they train; nothing is checked for one process or one optimizer.
        takes_part: whether this process has chosen; otherwise it takes the others' choice.

    Raises:
        ConfigurationError: the processes have chosen different optimizers.
    """
    joint, process_group = setup.optimizer, setup.process_group
    if not isinstance(joint, JointOptimizer) or process_group is None:
        return
    chosen = float(joint.chosen)
    said = [chosen, chosen**2, 1.0] if takes_part else [0.0, 0.0, 0.0]
    total, squares, count = process_group.total(said)()
    if total**2 != squares * count:
        raise ConfigurationError(
            f"rank {process_group.rank} makes a step of optimizer {joint.chosen}, and another "
            "process of another: every process must step the same optimizers in the same order"
        )
    joint.chosen = round(total / count)

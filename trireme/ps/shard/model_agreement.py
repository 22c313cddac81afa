"""What every worker of a job must show alike: the model, the optimizer and the rule."""

from __future__ import annotations

from dataclasses import dataclass

from trireme.errors import ModelMismatchError
from trireme.ps.layout import Layout
from trireme.ps.messages import OptimizerSpec
from trireme.ps.rule import Rule

__all__ = ["ShownModel"]


@dataclass(frozen=True, slots=True)
class ShownModel:
    """What one worker has shown; that of the first worker holds for all.

    Attributes:
        task: the worker's name, such as `worker:0`.
        layout: the model's layout.
        optimizer: what updates the values.
        rule: how pushes become steps.
    """

    task: str
    layout: Layout
    optimizer: OptimizerSpec
    rule: Rule

    def check_same(self, other: ShownModel) -> None:
        """Checks that another worker trains the same.

        Raises:
            ModelMismatchError: names the first difference.
        """
        self.layout.check_same(other.layout, whose=self.task, others=other.task)
        if other.rule != self.rule:
            raise ModelMismatchError(
                f"the strategies differ: {self.task} trains by {_shown(self.rule)}, {other.task} "
                f"by {_shown(other.rule)}; start every task with the same options"
            )
        if other.optimizer.names != self.optimizer.names:
            raise ModelMismatchError(
                f"the optimizers differ: {_listed(self.optimizer)} at {self.task}, "
                f"{_listed(other.optimizer)} at {other.task}"
            )


def _listed(optimizer: OptimizerSpec) -> str:
    return ", ".join(dict.fromkeys(optimizer.names))


def _shown(rule: Rule) -> str:
    return ", ".join(
        f"{name} {value}"
        for name in rule.__struct_fields__
        if (value := getattr(rule, name)) is not None
    )

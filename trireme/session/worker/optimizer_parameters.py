"""Which parameters an optimizer has, and the changes that a program makes to them later."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn

from trireme.errors import ConfigurationError


class OptimizerParameters:
    """Notices that a program gives an optimizer other parameters, or unfreezes some.

    `add_param_group`, an addition to `param_groups` and one to a group's `params` all show in the
    groups themselves, which are compared with those of the step before.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        frozen: Sequence[nn.Parameter],
        name_of: Callable[[torch.Tensor], str | None],
    ) -> None:
        self._optimizer = optimizer
        self._name_of = name_of
        self._then: list[list[int]] = []
        self._frozen = frozen
        self.remember()

    def remember(self) -> None:
        """Takes the present groups as known."""
        self._then = self._now()

    def check(self) -> None:
        """Checks that the optimizer has the parameters that it had at `remember`."""
        self.check_frozen()
        now = self._now()
        if now != self._then:
            raise self._other_groups(now)

    @property
    def changed(self) -> bool:
        """Whether the optimizer has other parameters, or some that were frozen are not any more."""
        return self._now() != self._then or any(p.requires_grad for p in self._frozen)

    def check_frozen(self) -> None:
        """Checks that none is trained now that was frozen when training began."""
        for parameter in self._frozen:
            if parameter.requires_grad:
                raise ConfigurationError(
                    f"parameter {self._name(parameter)} requires a gradient now, and did not when "
                    f"training began: {_NO_PLACE}. {_INSTEAD}"
                )

    def _other_groups(self, now: list[list[int]]) -> ConfigurationError:
        before = {each for group in self._then for each in group}
        parameters = (p for group in self._optimizer.param_groups for p in group["params"])
        added = [parameter for parameter in parameters if id(parameter) not in before]
        if added:
            more = f" and {len(added) - 1} more" if added[1:] else ""
            return ConfigurationError(
                f"parameter {self._name(added[0])}{more} given to the optimizer after training "
                f"began: {_NO_PLACE}. {_INSTEAD}"
            )
        return ConfigurationError(
            f"the numbers of parameters in the optimizer's groups are {_sizes(now)} now, and were "
            f"{_sizes(self._then)} when training began: to train some no longer, call "
            "requires_grad_(False) on them and leave them in their groups"
        )

    def _now(self) -> list[list[int]]:
        groups = self._optimizer.param_groups
        return [[id(parameter) for parameter in group["params"]] for group in groups]

    def _name(self, parameter: torch.Tensor) -> str:
        """Returns the model's name for a parameter, in quotes; or its shape."""
        name = self._name_of(parameter)
        shape = f"of shape {tuple(parameter.shape)}, which the model does not have,"
        return shape if name is None else repr(name)


def _sizes(groups: list[list[int]]) -> str:
    return " + ".join(str(len(group)) for group in groups)


_NO_PLACE = "it has no place in the job and would not be trained"
_INSTEAD = (
    "Give the optimizer all parameters when training begins, let them require a gradient then, "
    "and call requires_grad_(False) after that on those that are to be trained later: they are "
    "left alone as long as they have no gradient"
)

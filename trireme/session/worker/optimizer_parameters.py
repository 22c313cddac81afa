"""Which parameters an optimizer has, and the changes that a program makes to them later."""

from __future__ import annotations

import torch

from trireme.errors import ConfigurationError
from trireme.session.model.training_setup import TrainingSetup

_TAKEN_OUT = (
    "parameters were taken out of the optimizer's groups, or moved between them, after training "
    "began: to train some no longer, call requires_grad_(False) on them and leave them in their "
    "groups"
)


def check_replaced(setup: TrainingSetup) -> None:
    """Checks that the model computes with the parameters that are trained."""
    if setup.part is not None:
        return
    held = dict(setup.model.named_parameters(remove_duplicate=False))
    for name, parameter in setup.flat.parameters.items():
        if held.get(name, parameter) is not parameter:
            raise ConfigurationError(
                f"the program has put another parameter in the place of {name!r}, which the "
                "optimizer trains: the model computes with one that is neither trained nor saved. "
                "Write into the one that is there, by session.write_values({name: tensor}) "
                "(optimizer.write_values in a loop of your own)"
            )


class OptimizerParameters:
    """Notices that a program gives an optimizer other parameters, or unfreezes some.

    `add_param_group`, an addition to `param_groups` and one to a group's `params` all show in the
    groups themselves, which are compared with those of the step before.
    """

    def __init__(self, setup: TrainingSetup) -> None:
        self._setup = setup
        self._frozen = setup.frozen()  # when training begins
        self.remember()

    def remember(self) -> None:
        self._known = self._now()

    def _now(self) -> list[list[int]]:
        groups = self._setup.optimizer.param_groups
        return [[id(parameter) for parameter in group["params"]] for group in groups]

    @property
    def changed(self) -> bool:
        """Whether the optimizer has other parameters, or some that were frozen are not any more."""
        return self._now() != self._known or any(p.requires_grad for p in self._frozen)

    def check(self) -> None:
        """Checks that the optimizer has the known parameters; names the first that differs."""
        self.check_frozen()
        if self._now() == self._known:
            return
        before = {each for group in self._known for each in group}
        every = (p for group in self._setup.optimizer.param_groups for p in group["params"])
        added = next((parameter for parameter in every if id(parameter) not in before), None)
        if added is not None:
            raise self._refused(added, "was given to the optimizer after training began")
        raise ConfigurationError(_TAKEN_OUT)

    def check_kept(self) -> None:
        """Checks that all known parameters are where they were, though others may have come."""
        now = self._now()
        for index, group in enumerate(self._known):
            if not (index < len(now) and {*group} <= {*now[index]}):
                raise ConfigurationError(_TAKEN_OUT)

    def check_frozen(self) -> None:
        """Checks that none is trained now that was frozen when training began."""
        for parameter in self._frozen:
            if parameter.requires_grad:
                what = "requires a gradient now, and did not when training began"
                raise self._refused(parameter, what)

    def _refused(self, parameter: torch.Tensor, what: str) -> ConfigurationError:
        name = self._setup.name_of(parameter)
        shown = f"of shape {tuple(parameter.shape)}" if name is None else repr(name)
        return ConfigurationError(
            f"parameter {shown} {what}: it has no place in the job and would not be trained. Give "
            "the optimizer all parameters when training begins, let them require a gradient then, "
            "and call requires_grad_(False) after that on those that are to be trained later: they "
            "are left alone as long as they have no gradient"
        )

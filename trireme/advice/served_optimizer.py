"""What a program does to an optimizer whose steps the servers make, where that would be lost."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import torch

from trireme.errors import ConfigurationError
from trireme.ps.messages import Span
from trireme.ps.optimizers import members
from trireme.session.worker.hyperparameters import hooks_of
from trireme.session.worker.observer import Observer

_ELSEWHERE = (
    "Or train where each process makes the steps itself: under plain python, without servers "
    "(--strategy allreduce), or with --strategy averaging"
)


class ServedOptimizer(Observer):
    """Refuses what a program asks of an optimizer that makes no step itself.

    The servers make its steps and hold its state, so that nobody calls its hooks and its `step`,
    and changes of its state have no effect.
    """

    def __init__(self, worker: Any) -> None:
        super().__init__(worker)
        setup = worker.setup
        served = setup.settings.task.servers and setup.outer is None
        self._members = members(setup.optimizer) if served else []
        self._calls_hooks = worker.own_loop  # the step of the program's own loop does
        self.remember()

    def on_start(self) -> None:
        self.check()

    def before_update(self, weight: float, examples: Sequence[Span]) -> None:
        self.check()

    def remember(self) -> None:
        """Takes the present state as the one that has no effect."""
        self._states: list[tuple[_State, dict[int, Any]]] = []
        for each in self._members:
            each.state = state = _State(dict, each.state)
            self._states.append((state, _contents(state)))

    def check(self) -> None:
        """Checks that nothing was asked for that would be lost."""
        for each, (state, contents) in zip(self._members, self._states, strict=True):
            name = type(each).__name__
            hooks = [] if self._calls_hooks else [*hooks_of(each, "pre"), *hooks_of(each, "post")]
            if hooks:
                lost = (
                    f"{_shown(hooks[0])}, a hook of the steps of the optimizer {name}, would never "
                    "be called: parameter servers make its steps. Let the session call what is to "
                    "happen before and after each step: hooks=[...], with before_step and "
                    "after_step, or write it around session.step()"
                )
            elif (another := replaced_step(each)) is not None:
                lost = (
                    f"the program has put {_shown(another)} in the place of the step of the "
                    f"optimizer {name}, which nobody calls: parameter servers make its steps. "
                    "Write what it does around the step of the session or of the loop"
                )
            elif each.state is not state or state.removed or _contents(state) != contents:
                lost = (
                    f"the program has changed the state of the optimizer {name} (optimizer.state), "
                    "and the change would be lost: parameter servers make its steps and hold its "
                    "state. Leave it as it is"
                )
            else:
                continue
            raise ConfigurationError(f"{lost}. {_ELSEWHERE}")


def replaced_step(optimizer: torch.optim.Optimizer) -> Any:
    """Returns what a program has put in the place of an optimizer's `step`; None if nothing.

    A scheduler puts a function there that only notes the call.
    """
    step = vars(optimizer).get("step")
    # Not by its attributes, which a program's wrapper around it has too.
    while getattr(step, "__globals__", {}).get("__name__") == "torch.optim.lr_scheduler":
        step = step.__wrapped__  # type: ignore[union-attr]
    own = step is None or getattr(step, "__func__", step) is type(optimizer).step
    return None if own else step


def _shown(function: Any) -> str:
    name = getattr(function, "__qualname__", None)
    return repr(function) if name is None else f"{name}()"


def _noted(removal: Callable[..., Any]) -> Any:
    def noted(state: _State, *arguments: Any) -> Any:
        state.removed = True
        return removal(state, *arguments)

    return noted


class _State(defaultdict[Any, Any]):
    """The state of an optimizer; notes removals, of which an empty one shows nothing."""

    removed = False
    clear, pop = _noted(dict.clear), _noted(dict.pop)
    popitem, __delitem__ = _noted(dict.popitem), _noted(dict.__delitem__)


def _contents(state: dict[Any, Any]) -> dict[int, Any]:
    """Returns what tells one content of a state from another; reading makes empty entries."""
    return {
        id(parameter): [(key, id(each), getattr(each, "_version", 0)) for key, each in own.items()]
        for parameter, own in state.items()
        if own
    }

"""The batches that a program's own loop gives to its model: how many examples, and which."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from trireme.ps.module_names import called_modules
from trireme.tensors import digest, tensors_in

COMPARED = 2
"""The number of batches at the beginning whose digests are kept, to compare those of workers."""


class BatchWatch:
    """Looks at what a model in training mode is called with.

    Calls inside `torch.compile` are not seen.

    Attributes:
        digests: the digests of the first batches, `COMPARED` at most.
    """

    def __init__(self, model: nn.Module) -> None:
        self.digests: list[bytes] = []
        self._examples: dict[nn.Module, int] = {}
        self._handles: list[RemovableHandle] = []
        for module in called_modules(model):
            # A LightningModule is not called itself, but its children are.
            children = [
                each.register_forward_pre_hook(self._called, with_kwargs=True)
                for each in module.children()
            ]
            own = module.register_forward_pre_hook(partial(_remove, children))
            called = module.register_forward_pre_hook(self._called, with_kwargs=True)
            self._handles += [*children, own, called]

    def _called(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if torch.compiler.is_compiling() or not (module.training and torch.is_grad_enabled()):
            return
        first = next(iter(tensors_in((args, kwargs))), None)
        if first is None or not first.dim():
            return
        self._examples[module] = self._examples.get(module, 0) + first.shape[0]
        if len(self.digests) < COMPARED:
            self.digests.append(digest((args, kwargs)))

    def take_examples(self) -> int:
        """Returns the number of examples since the last call; 0 where none were seen.

        Of several modules, such as a discriminator that sees true and made images, it is that of
        the module that has seen the fewest.
        """
        fewest = min(self._examples.values(), default=0)
        self._examples.clear()
        return fewest

    def close(self) -> None:
        """Looks at no more batches."""
        for handle in self._handles:
            handle.remove()


def _remove(handles: list[RemovableHandle], module: nn.Module, args: Any) -> None:
    """Removes the hooks of a module's children, as it is called itself."""
    if not torch.compiler.is_compiling():
        while handles:
            handles.pop().remove()

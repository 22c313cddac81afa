"""Whether a batch may be computed in micro-batches: whether loss and gradients stay the same."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from trireme.graph.capture.rehearsal import restored, restored_state
from trireme.graph.placed.graph_execution import same_loss
from trireme.session.loss import Loss, model_loss, scalar
from trireme.session.model.batch import arguments, examples_in, pieces
from trireme.tensors import joined, map_tensors, tensors_in

_CLOSE = 1e-4
"""By how much outputs and gradients may differ, relative to the largest: small batches are computed
by other kernels, which round otherwise."""


def divides(model: nn.Module, loss: Loss, batch: tuple[Any, Any], count: int) -> bool:
    """Returns whether the mean of micro-batches, weighted by examples, is that of the batch.

    Three things are compared: the outputs, which differ where layers look at the whole batch; the
    loss; and the gradients of the loss with respect to outputs, at random outputs too. These differ
    where the loss is no mean over the examples (targets that are ignored, weights of classes,
    losses within the batch). It is False as well where that cannot be found out: if the loss keeps
    state between calls, cannot be computed of a part of the batch, or is the model's own.

    Model and loss keep their state. If layers draw random numbers in training mode, as dropout
    does, the model is in evaluation mode meanwhile.
    """
    if loss is model_loss:
        return False
    modes = [(module, module.training) for module in model.modules()]
    with restored(model), restored_state(loss) as changed:
        try:
            found = _divides(model, loss, batch, count)
        finally:
            for module, training in modes:
                module.training = training
        return found and not changed()


def _divides(model: nn.Module, loss: Loss, batch: tuple[Any, Any], count: int) -> bool:
    inputs, targets = batch
    divided = list(pieces(batch, count))
    with torch.no_grad():
        outputs = _outputs(model, inputs)
        if not _close(outputs, _outputs(model, inputs)):
            model.eval()
            outputs = _outputs(model, inputs)
    scalar(loss(outputs, targets))  # says what is wrong with it, before parts are tried
    try:
        with torch.no_grad():
            parts = [_outputs(model, piece) for (piece, _), _ in divided]
            together = joined(parts)
            if not _close(outputs, together) or examples_in(outputs) != examples_in(batch):
                return False
        return _loss_divides(loss, outputs, targets, count) and _divides_at_random(
            loss, outputs, targets, count
        )
    except Exception:  # the loss, or a layer, does not take a part of a batch
        return False


def _outputs(model: nn.Module, inputs: Any) -> Any:
    args, kwargs = arguments(inputs)
    return model(*args, **kwargs)


def _divides_at_random(loss: Loss, outputs: Any, targets: Any, count: int) -> bool:
    generator = torch.Generator().manual_seed(0)

    def other(tensor: torch.Tensor) -> torch.Tensor:
        if not tensor.is_floating_point():
            return tensor
        noise = torch.randn(tensor.shape, generator=generator).to(tensor)
        return tensor + noise

    random = map_tensors(outputs, other)
    try:
        usable = bool(torch.isfinite(scalar(loss(random, targets))))
    except Exception:  # a loss of probabilities, say
        usable = False
    return not usable or _loss_divides(loss, random, targets, count)


def _loss_divides(loss: Loss, outputs: Any, targets: Any, count: int) -> bool:
    """Returns whether a loss of given outputs, and its gradients, are those of the parts."""
    whole, expected = _differentiated(loss, outputs, targets, 1.0)
    examples = examples_in(outputs)
    total, gradients = torch.zeros_like(whole), []
    for (part, own), size in pieces((outputs, targets), count):
        value, found = _differentiated(loss, part, own, size / examples)
        total += value
        gradients.append(found)
    return same_loss(whole, total) and _close(expected, joined(gradients))


def _differentiated(
    loss: Loss, outputs: Any, targets: Any, share: float
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Returns a weighted loss, and its gradients with respect to the outputs."""
    leaves = map_tensors(outputs, _leaf)
    wanted = [each for each in tensors_in(leaves) if each.requires_grad]
    with torch.enable_grad():
        value = scalar(loss(leaves, targets)).reshape(()) * share
        # A loss that does not depend on them has zeros.
        value = value + sum((each.sum() * 0.0 for each in wanted), torch.zeros_like(value))
        found = torch.autograd.grad(value, wanted) if wanted else ()
    return value.detach(), list(found)


def _leaf(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().clone().requires_grad_(tensor.is_floating_point())


def _close(one: Any, other: Any) -> bool:
    pairs = list(tensors_in(one)), list(tensors_in(other))
    return len(pairs[0]) == len(pairs[1]) and all(map(_close_tensors, *pairs))


def _close_tensors(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    if not (one.is_floating_point() or one.is_complex()):
        return torch.equal(one, other)
    if not one.numel():
        return True
    bound = _CLOSE * float(one.abs().max())
    return torch.allclose(one, other, rtol=0.0, atol=max(bound, 1e-12), equal_nan=True)

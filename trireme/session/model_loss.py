"""The loss that a model computes itself, as a session's loss."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from trireme.errors import ConfigurationError

__all__ = ["model_loss"]


def model_loss(outputs: Any, targets: Any) -> torch.Tensor:
    """Returns the loss that the model has computed from the batch itself.

    `Session(model, trireme.model_loss, ...)` gives the model the whole batch, `labels` included,
    as Hugging Face's models take it, and trains by the `loss` that is in the outputs.

    Args:
        outputs: of the model: a mapping with a `loss`, an object that has one, a tuple whose first
            is it, or the loss itself.
        targets: not looked at.

    Raises:
        ConfigurationError: there is none; says what there is.
    """
    if isinstance(outputs, Mapping):
        loss, there = outputs.get("loss"), f"the keys {', '.join(map(str, outputs))}"
    elif isinstance(outputs, (tuple, list)):
        loss, there = (outputs[0] if outputs else None), f"a tuple of {len(outputs)}"
    elif isinstance(outputs, torch.Tensor):
        loss, there = outputs, f"a tensor of shape {tuple(outputs.shape)}"
    else:
        loss, there = getattr(outputs, "loss", None), f"a {type(outputs).__name__}"
    if isinstance(loss, torch.Tensor) and loss.numel() == 1:
        return loss
    raise ConfigurationError(
        f"model_loss: the model's outputs have no loss of one number: they are {there}. Models of "
        "transformers compute one where the batch has labels; else give the session a loss "
        "function of (outputs, targets)"
    )

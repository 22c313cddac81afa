"""The loss that a program trains by."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from trireme.errors import ConfigurationError

Loss = Callable[[Any, Any], Any]
"""(outputs, targets) -> the mean over the batch, as a scalar or as the entry `loss` of a dict."""


def scalar(loss: Any) -> torch.Tensor:
    """Returns the loss that a loss function has returned, as one number.

    Raises:
        ConfigurationError: it is not a scalar tensor, nor a dict whose `loss` is one.
    """
    if isinstance(loss, dict):
        loss = loss.get("loss")
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        found = type(loss).__name__
        if isinstance(loss, torch.Tensor):
            found = f"a tensor of shape {tuple(loss.shape)}"
        raise ConfigurationError(
            f"the loss is {found}: it must be one number as a tensor, such as the mean over the "
            'batch (reduction="mean"), or a dict whose "loss" is that'
        )
    return loss


def model_loss(outputs: Any, targets: Any) -> torch.Tensor:
    """Returns the loss that the model itself has computed from the batch.

    `Session(model, trireme.model_loss, ...)` gives the model the whole batch, `labels` included,
    as Hugging Face's models take it, and trains by the `loss` that is in the outputs.

    Args:
        outputs: the model's outputs: a mapping or an object with a `loss`, a tuple whose first item
            is the loss, or the loss itself.
        targets: ignored.

    Raises:
        ConfigurationError: the outputs have no loss; describes them.
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

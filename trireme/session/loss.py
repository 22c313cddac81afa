"""The loss that a program trains by."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from trireme.errors import ConfigurationError

Loss = Callable[[Any, Any], Any]  # (outputs, targets) -> the mean, or a dict with it as `loss`


def scalar(loss: Any) -> torch.Tensor:
    """Returns the loss that a loss function has returned, as one number.

    Raises:
        ConfigurationError: it is not a scalar tensor, nor a dict whose `loss` is one.
    """
    if isinstance(loss, dict):
        loss = loss.get("loss")
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        raise ConfigurationError(
            f"the loss is {described(loss)}: it must be one number as a tensor, such as the mean "
            'over the batch (reduction="mean"), or a dict whose "loss" is that'
        )
    return loss


def described(value: Any) -> str:
    """Returns what kind of value a program's function has returned, for an error."""
    if isinstance(value, Mapping):
        return f"the keys {', '.join(map(str, value))}"
    if isinstance(value, torch.Tensor):
        return f"a tensor of shape {tuple(value.shape)}"
    return "None" if value is None else type(value).__name__


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
        loss = outputs.get("loss")
    elif isinstance(outputs, (tuple, list)):
        loss = outputs[0] if outputs else None
    else:
        loss = outputs if isinstance(outputs, torch.Tensor) else getattr(outputs, "loss", None)
    if isinstance(loss, torch.Tensor) and loss.numel() == 1:
        return loss
    raise ConfigurationError(
        f"model_loss: the model's outputs have no loss of one number: they are "
        f"{described(outputs)}. Models of "
        "transformers compute one where the batch has labels; else give the session a loss "
        "function of (outputs, targets)"
    )

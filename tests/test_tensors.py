"""Tensors inside structures: replaced, while everything else stays what it was."""

from __future__ import annotations

from collections import OrderedDict, UserDict, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

import pytest
import torch

from trireme.errors import ConfigurationError
from trireme.tensors import digest, map_tensors, tensors_in


class Named(NamedTuple):
    logits: torch.Tensor
    note: str = "kept"


class ByAttribute(dict[str, Any]):
    """A dict whose items are attributes too, as many libraries have."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


@dataclass
class ModelOutput(OrderedDict[str, Any]):
    """A dict and a dataclass at once, which refuses its dict's constructor: as transformers'."""

    loss: torch.Tensor | None = None
    logits: torch.Tensor | None = None

    def __post_init__(self) -> None:
        for each in fields(self):
            if getattr(self, each.name) is not None:
                self[each.name] = getattr(self, each.name)

    def __setitem__(self, name: str, value: Any) -> None:
        super().__setitem__(name, value)
        super().__setattr__(name, value)

    def __delitem__(self, name: str) -> None:
        raise TypeError("items cannot be deleted")

    def __reduce__(self) -> Any:
        values = tuple(getattr(self, each.name) for each in fields(self))
        return type(self), values


@dataclass(frozen=True, slots=True)
class Frozen:
    scores: torch.Tensor
    others: tuple[torch.Tensor, ...] = ()
    name: str = "frozen"


@dataclass
class Computed:
    """What its constructor takes is not what it has."""

    size: int
    made: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.made = torch.ones(self.size)


class Triple(tuple[torch.Tensor, ...]):
    pass


class Pile(list[torch.Tensor]):
    color = "red"


class Encoding(UserDict[str, Any]):
    pass


class Shared(Mapping[str, Any]):
    """A mapping that cannot be changed."""

    def __init__(self, items: Mapping[str, Any]) -> None:
        self._items = dict(items)

    def __getitem__(self, name: str) -> Any:
        return self._items[name]

    def __iter__(self) -> Any:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)


def one() -> torch.Tensor:
    return torch.ones(2, requires_grad=True)


def grouped() -> defaultdict[str, list[torch.Tensor]]:
    made: defaultdict[str, list[torch.Tensor]] = defaultdict(list)
    made["a"].append(one())
    return made


STRUCTURES = {
    "tuple": (one(), 1, "a"),
    "list": [one(), [one()]],
    "dict": {"a": one(), "b": None},
    "named tuple": Named(one()),
    "dict subclass": ByAttribute(logits=one(), hidden=(one(), one())),
    "default dict": grouped(),
    "ordered dict": OrderedDict(z=one(), a=one()),
    "model output": ModelOutput(loss=one().sum(), logits=one()),
    "frozen dataclass": Frozen(one(), (one(),)),
    "dataclass with a constructor of its own": Computed(3),
    "tuple subclass": Triple([one(), one()]),
    "list subclass": Pile([one()]),
    "user dict": Encoding(input_ids=one()),
    "mapping": Shared({"a": one()}),
    "nested": {"out": Named(one()), "more": [Frozen(one()), ModelOutput(logits=one())]},
}


@pytest.mark.parametrize("value", STRUCTURES.values(), ids=STRUCTURES)
def test_each_structure_comes_back_as_what_it_was(value: Any) -> None:
    before = list(tensors_in(value))
    mapped = map_tensors(value, lambda tensor: tensor.detach() * 2)
    assert type(mapped) is type(value)
    after = list(tensors_in(mapped))
    assert len(after) == len(before) > 0
    for old, new in zip(before, after, strict=True):
        torch.testing.assert_close(new, old.detach() * 2)
        assert not new.requires_grad
    assert all(a is b for a, b in zip(before, tensors_in(value), strict=True)), "not the given one"


def test_attributes_and_items_of_a_model_output_stay_the_same_objects() -> None:
    mapped = map_tensors(STRUCTURES["model output"], torch.Tensor.detach)
    assert mapped.loss is mapped["loss"] and mapped.logits is mapped["logits"]
    assert list(mapped) == ["loss", "logits"]


def test_what_is_no_tensor_is_the_same_object() -> None:
    note = object()
    assert map_tensors({"a": note}, torch.Tensor.detach)["a"] is note
    assert map_tensors(Frozen, torch.Tensor.detach) is Frozen
    assert map_tensors(Named(one(), "x"), torch.Tensor.detach).note == "x"


class Stubborn(dict[str, Any]):
    def __setitem__(self, name: str, value: Any) -> None:
        raise TypeError("read only")


def test_what_cannot_be_made_anew_is_refused_by_name() -> None:
    with pytest.raises(ConfigurationError, match=r"a Stubborn .* cannot be made anew .*read only"):
        map_tensors(Stubborn(a=one()), torch.Tensor.detach)


def test_what_is_changed_alike_everywhere_has_another_digest() -> None:
    """Exclusive ors of rows and columns, as the watch takes them, would be the same."""
    values = torch.randn(1024, 1024)
    assert digest(values) == digest(values.clone())
    assert digest(values) != digest(-values)
    assert digest(values) != digest(values.flip(0))

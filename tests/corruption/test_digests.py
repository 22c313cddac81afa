"""Digests see each bit and its place, and say which one has changed."""

from __future__ import annotations

import random

import pytest
import torch

from trireme.corruption.digests import Seal, digest

_ROW = 4096


def tensors() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [
        torch.randn(40, generator=generator),
        torch.randn(5, 3, generator=generator, dtype=torch.float64),
        torch.tensor(7.0),
        torch.randn(7, generator=generator).bfloat16(),
        torch.empty(0),
        torch.randn(300 * _ROW // 4 + 5, generator=generator),
    ]


def sealed(held: list[torch.Tensor]) -> Seal:
    return Seal((f"{place}", tensor) for place, tensor in enumerate(held))


def bytes_of(tensor: torch.Tensor) -> memoryview:
    return tensor.reshape(-1).view(torch.uint8).numpy().data


def test_the_same_bytes_have_one_digest_wherever_they_lie() -> None:
    assert digest(tensors()) == digest([each.clone() for each in tensors()]) != 0
    assert digest([torch.zeros(9)]) not in (0, digest([torch.zeros(17)]))
    assert digest([]) != 0


@pytest.mark.parametrize("seed", range(60))
def test_each_bit_changes_the_digest_and_is_found_and_put_back(seed: int) -> None:
    rng, held = random.Random(seed), tensors()
    seal, before = sealed(held), digest(held)
    place = rng.choice([0, 1, 2, 3, 5])
    data = bytes_of(held[place])
    at, bit = rng.randrange(len(data)), rng.randrange(8)
    data[at] ^= 1 << bit
    assert digest(held) != before
    differ = {name for name, each in sealed(held).digests.items() if each != seal.digests[name]}
    assert differ == {f"{place}"}
    change, size = seal.changed(), held[place].element_size()
    assert f"{change}" == f"bit {8 * (at % size) + bit} of element {at // size} of {place}"
    assert change is not None
    change.mend()
    assert digest(held) == before and seal.changed() is None
    assert all(map(torch.equal, held, tensors()))


def test_several_bits_of_one_word_are_put_back() -> None:
    held = tensors()
    seal = sealed(held)
    data = bytes_of(held[1])
    data[16] ^= 0b101
    data[23] ^= 1 << 7
    change = seal.changed()
    assert change is not None and (change.word, change.bits) == (2, 0b101 | 1 << 63)
    change.mend()
    assert all(map(torch.equal, held, tensors()))


def test_several_words_change_the_digest_and_are_not_taken_for_one() -> None:
    for seed in range(50):
        rng, held = random.Random(seed), tensors()
        seal, before = sealed(held), digest(held)
        data, bit = bytes_of(held[5]), 1 << rng.randrange(8)
        for at in rng.sample(range(0, len(data), 8), 2):
            data[at] ^= bit
        assert digest(held) != before
        assert f"{seal.changed()}" == "several words"


def test_values_that_change_places_change_the_digest() -> None:
    one = torch.arange(2048.0)
    for places in ([2, 40], [2, 1026], [5, 1500]):
        other = one.clone()
        other[places] = one[places[::-1]]
        assert digest([one]) != digest([other])
    assert digest([one[:32], one[32:]]) != digest([one[32:], one[:32]])


def test_a_bit_of_a_tensor_with_two_names_is_one_bit() -> None:
    """As the step of an optimizer, which the parameters of a group share."""
    step = torch.tensor(6.0)
    seal = Seal([("weight/step", step), ("bias/step", step)])
    step.view(torch.int32).bitwise_xor_(64)
    change = seal.changed()
    assert change is not None and str(change) == "bit 6 of element 0 of weight/step"
    change.mend()
    assert step == 6.0


def test_nothing_is_found_where_nothing_has_changed() -> None:
    assert sealed(tensors()).changed() is None


def test_a_bit_of_what_lies_in_another_order_is_put_back() -> None:
    held = torch.randn(6, 4).t()
    seal, right = sealed([held]), held.clone()
    held.t().reshape(-1).view(torch.uint8).numpy()[17] ^= 4
    change = seal.changed()
    assert change is not None
    change.mend()
    assert torch.equal(held, right)


def test_one_element_of_any_stride_has_the_digest_of_its_bytes() -> None:
    odd = torch.tensor([7]).as_strided((1,), (0,))
    assert odd.is_contiguous() and odd.stride(0) == 0
    assert digest([odd]) == digest([torch.tensor([7])])

"""Zero points and orders of packed files, as their tools write them."""

from __future__ import annotations

import pytest
import torch

from quire_quantization.numbers import in_every_case
from quire_quantization.stored import pack_int32, read_awq, read_gptq, unpack_int32

INPUTS, OUTPUTS = 32, 8


def gptq(stored: int, *, symmetric: bool | None) -> torch.Tensor | None:
    """Zero points read of a file whose stored ones are all this, of a first version, which stores them one smaller."""
    qweight = pack_int32(torch.full((OUTPUTS, INPUTS), 9), 4).T.contiguous()
    qzeros = pack_int32(torch.full((1, OUTPUTS), stored), 4)
    scales = torch.ones(1, OUTPUTS)
    return read_gptq(qweight, qzeros, scales, None, bits=4, zero_offset=1, name="q", symmetric=symmetric).zero


@pytest.mark.parametrize("stored", [7, 8])
def test_symmetric_zero_points_are_the_middle_however_they_are_stored(stored: int) -> None:
    assert gptq(stored, symmetric=True) is None


def test_other_zero_points_are_one_larger_than_stored() -> None:
    assert gptq(7, symmetric=False) is None
    zero = gptq(8, symmetric=False)
    assert zero is not None
    assert zero.flatten().tolist() == [1] * OUTPUTS


@pytest.mark.parametrize(("symmetric", "found"), [(True, {False}), (False, {False, True}), (None, {False, True})])
def test_weights_that_are_not_there_have_the_zero_points_that_their_files_may_have(
    symmetric: bool | None, found: set[bool]
) -> None:
    has_zero: set[bool] = set()
    in_every_case(lambda: has_zero.add(gptq(3, symmetric=symmetric) is not None))
    assert has_zero == found


def test_awq_packs_each_eight_outputs_in_its_order() -> None:
    """The first number of a word is output 0, the second output 2 (AutoAWQ's order of packing)."""
    places = [0, 2, 4, 6, 1, 3, 5, 7]
    packed = pack_int32(torch.tensor([places]).expand(INPUTS, 8).contiguous(), 4)
    weight = read_awq(packed, pack_int32(torch.full((1, 8), 8), 4), torch.ones(1, 8))
    assert weight.elements[:, 0].tolist() == [number - 8 for number in range(8)]
    assert weight.zero is None


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 7, 8])
def test_numbers_side_by_side_in_words(bits: int) -> None:
    """Also where a number begins in one word and ends in the next."""
    numbers = torch.randint(0, 1 << bits, (3, 96), generator=torch.manual_seed(bits))
    rows = []
    for row in numbers.tolist():
        stream = sum(number << bits * place for place, number in enumerate(row))
        rows.append([stream >> 32 * word & 0xFFFFFFFF for word in range(96 * bits // 32)])
    packed = torch.tensor(rows, dtype=torch.int64).to(torch.uint32).view(torch.int32)
    assert torch.equal(unpack_int32(packed, bits, 1), numbers.to(torch.int32))
    assert torch.equal(unpack_int32(packed.T.contiguous(), bits, 0), numbers.T.to(torch.int32))

"""Slots: what is in them, which tokens use them, and what layers make of it."""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch
from lora_files import HIDDEN, SHAPES, VOCAB, make_slots
from numpy.typing import NDArray
from torch import Tensor

from quire_lora import Adapter, AdapterSlots
from quire_lora.adapter import LinearAdapter, TableAdapter
from quire_ops import NO_SLOT

NAME = "model.layers.0.q_proj"
OUTPUTS = SHAPES[NAME][0]


def slot_array(*slots: int) -> NDArray[np.int32]:
    return np.array(slots, dtype=np.int32)


def linear(rank: int, *, scale: bool = False, shift: bool = False, name: str = NAME) -> LinearAdapter:
    outputs, inputs = SHAPES[name]
    return LinearAdapter(
        a=torch.randn(rank, inputs),
        b=torch.randn(rank, outputs),
        scale=torch.rand(outputs) + 0.5 if scale else None,
        shift=torch.randn(outputs) if shift else None,
    )


def adapted(adapter: LinearAdapter | None, out: Tensor, x: Tensor) -> Tensor:
    """One row, by the formula: out * scale + x A^T B + shift."""
    if adapter is None:
        return out
    scale = 1.0 if adapter.scale is None else adapter.scale.double()
    shift = 0.0 if adapter.shift is None else adapter.shift.double()
    return out.double() * scale + x.double() @ adapter.a.double().T @ adapter.b.double() + shift


@pytest.mark.parametrize("seed", range(6))
def test_each_token_gets_what_its_slot_holds(seed: int) -> None:
    generator = np.random.default_rng(seed)
    slots = make_slots(num_slots=4)
    kinds = [linear(2), linear(4, scale=True), linear(1, shift=True), None]
    for slot, adapter in enumerate(kinds):
        slots.place(slot, f"v{slot}", Adapter(linears={} if adapter is None else {NAME: adapter}))
    of_token = generator.integers(-1, 4, size=9).astype(np.int32)
    x, before = torch.randn(9, HIDDEN), torch.randn(9, OUTPUTS)
    tokens, out = slots.tokens_of(of_token), before.clone()
    assert tokens is not None
    weights = slots.linears[NAME].weights
    assert weights is not None
    slots.add(out, x, weights, tokens)
    for token, slot in enumerate(of_token.tolist()):
        expected = adapted(kinds[slot] if slot >= 0 else None, before[token], x[token])
        torch.testing.assert_close(out[token].double(), expected.double(), rtol=1e-5, atol=1e-5)


def test_tokens_without_adapters_are_nothing_to_carry() -> None:
    slots = make_slots()
    assert slots.tokens_of(slot_array(-1, -1)) is None
    assert slots.tokens_of(slot_array()) is None


def test_tokens_are_in_order_slot_by_slot() -> None:
    tokens = make_slots(num_slots=3).tokens_of(slot_array(2, -1, 0, 2, 0))
    assert tokens is not None
    assert tokens.slots.tolist() == [2, -1, 0, 2, 0]
    assert tokens.order.tolist() == [2, 4, 0, 3]
    assert tokens.groups.tolist() == [[0, 0, 2], [2, 2, 4]]


def test_the_same_version_is_not_written_again() -> None:
    slots = make_slots()
    slots.place(0, "v", Adapter(linears={NAME: linear(2)}))
    weights = slots.linears[NAME].weights
    assert weights is not None
    before = weights.a.clone()
    slots.place(0, "v", Adapter(linears={NAME: linear(2)}))
    assert torch.equal(weights.a, before)
    slots.place(0, "w", Adapter(linears={NAME: linear(2)}))
    assert not torch.equal(weights.a, before)
    assert slots.versions == ["w", None]


def test_tensors_of_slots_never_move() -> None:
    slots = make_slots()
    weights = slots.linears[NAME].weights
    assert weights is not None
    places = [each.data_ptr() for each in (weights.a, weights.b, weights.scale, weights.shift)]
    for version in "abc":
        slots.place(1, version, Adapter(linears={NAME: linear(3, scale=True, shift=True)}))
    assert places == [each.data_ptr() for each in (weights.a, weights.b, weights.scale, weights.shift)]


def test_one_layer_of_a_slot_can_be_emptied_and_filled() -> None:
    slots, adapter = make_slots(), linear(2, shift=True)
    weights = slots.linears[NAME].weights
    assert weights is not None
    slots.place_linear(NAME, 1, adapter)
    assert (weights.ranks.tolist(), weights.adjusted.tolist()) == ([0, 2], [0, 1])
    slots.place_linear(NAME, 1, None)
    assert (weights.ranks.tolist(), weights.adjusted.tolist()) == ([0, 0], [0, 0])
    assert not weights.a.any()
    assert not weights.b.any()


def test_layers_say_what_they_were_before_an_adapter_was_put_into_them() -> None:
    slots = AdapterSlots(1, 2, torch.float32, torch.device("cpu"))
    weight = torch.randn(3, 5)
    slots.linear("layer", 3, 5, lambda: (weight.float().clone(), None), lambda: weight)
    assert slots.has_plain_weights
    slots.weights_before["layer"] = weight.clone()
    weight += 1
    base, bias = slots.linears["layer"].base()
    assert torch.equal(base, weight - 1) or torch.allclose(base, weight - 1)
    assert bias is None
    slots.weights_before.clear()
    assert torch.equal(slots.linears["layer"].base()[0], weight)
    assert not make_slots().has_plain_weights, "none of these layers lies in memory as it is multiplied with"


# Tables.


def test_embeddings_are_replaced_and_added_to() -> None:
    slots, ids = make_slots(num_slots=3), torch.tensor([1, 1, 5, 1])
    weight, a, b = torch.randn(VOCAB, HIDDEN), torch.randn(VOCAB, 2), torch.randn(2, HIDDEN)
    slots.place(0, "weight", Adapter(embedding=TableAdapter(weight=weight)))
    slots.place(1, "product", Adapter(embedding=TableAdapter(a=a, b=b)))
    slots.place(2, "neither", Adapter(linears={NAME: linear(1)}))
    own = torch.randn(4, HIDDEN)
    out, tokens = own.clone(), slots.tokens_of(slot_array(0, 1, 1, 2))
    assert tokens is not None
    slots.embed(out, ids, tokens)
    assert torch.equal(out[0], weight[1])
    torch.testing.assert_close(out[1], own[1] + a[1] @ b)
    torch.testing.assert_close(out[2], own[2] + a[5] @ b)
    assert torch.equal(out[3], own[3])


def test_logits_are_replaced_and_added_to() -> None:
    slots, hidden = make_slots(num_slots=2), torch.randn(3, HIDDEN)
    assert slots.logit_tokens_of(slot_array(0, 1)) is None, "no slot changes the head"
    weight, a, b = torch.randn(VOCAB, HIDDEN), torch.randn(2, HIDDEN), torch.randn(2, VOCAB)
    slots.place(0, "both", Adapter(lm_head=TableAdapter(weight=weight, a=a, b=b)))
    own = torch.randn(3, VOCAB)
    out, tokens = own.clone(), slots.logit_tokens_of(slot_array(-1, 0, 1))
    assert tokens is not None
    slots.logits(out, hidden, tokens)
    assert torch.equal(out[0], own[0])
    torch.testing.assert_close(out[1], weight @ hidden[1] + hidden[1] @ a.T @ b)
    assert torch.equal(out[2], own[2])


def test_a_slot_forgets_the_tables_of_the_adapter_before() -> None:
    slots = make_slots()
    slots.place(0, "old", Adapter(embedding=TableAdapter(weight=torch.zeros(VOCAB, HIDDEN))))
    assert slots.changes_vocabulary(slot_array(0))
    assert not slots.changes_vocabulary(slot_array(1, -1))
    slots.place(0, "new", Adapter(lm_head=TableAdapter(weight=torch.zeros(VOCAB, HIDDEN))))
    own, tokens = torch.randn(1, HIDDEN), slots.tokens_of(slot_array(0))
    assert tokens is not None
    out = own.clone()
    slots.embed(out, torch.tensor([3]), tokens)
    assert torch.equal(out, own)
    assert slots.changes_vocabulary(slot_array(0))
    slots.place(0, "none", Adapter())
    assert not slots.changes_vocabulary(slot_array(0))


# Graphs.


def capturable(num_slots: int = 3) -> AdapterSlots:
    """Slots whose op finds tokens on the device, as on a GPU."""
    slots = make_slots(num_slots=num_slots)
    slots.capture_refusal = None
    return slots


def test_captured_tokens_are_written_where_they_were() -> None:
    slots = capturable()
    first = slots.captured_tokens_of(slot_array(1, -1, 0), 5)
    assert first is not None
    assert first.is_fixed
    assert first.slots.tolist() == [1, NO_SLOT, 0, NO_SLOT, NO_SLOT]
    assert first.slots[first.order.long()].tolist() == [0, 1, NO_SLOT, NO_SLOT, NO_SLOT]
    places = first.slots.data_ptr(), first.order.data_ptr()
    second = slots.captured_tokens_of(slot_array(2, 2, 2, 2, 0), 5)
    assert second is not None
    assert (second.slots.data_ptr(), second.order.data_ptr()) == places
    assert first.slots.tolist() == [2, 2, 2, 2, 0], "a graph that was captured with the first reads these"
    other = slots.captured_tokens_of(slot_array(0), 4)
    assert other is not None
    assert other.slots.data_ptr() != places[0]
    assert all(each.data_ptr() % 16 == 0 for each in (first.slots, first.order, other.slots, other.order))


def test_steps_are_captured_with_scales_and_shifts() -> None:
    slots = capturable()
    slots.place(0, "plain", Adapter(linears={NAME: linear(2)}))
    slots.place(1, "shifted", Adapter(linears={NAME: linear(2, shift=True)}))
    assert slots.captured_tokens_of(slot_array(0, -1), 2) is not None
    assert slots.captured_tokens_of(slot_array(0, 1), 2) is not None
    weights = slots.linears[NAME].weights
    assert weights is not None
    assert weights.device_adjusted is not None
    assert weights.device_adjusted.tolist() == [0, 1, 0]
    slots.place(1, "plain too", Adapter(linears={NAME: linear(2)}))
    assert weights.device_adjusted.tolist() == [0, 0, 0]


def test_steps_are_not_captured_where_the_op_finds_tokens_on_the_host() -> None:
    slots = make_slots()
    assert slots.capture_refusal is not None
    assert "lora_linear" in slots.capture_refusal
    assert slots.captured_tokens_of(slot_array(0), 1) is None


def test_unused_slots_take_no_memory_of_their_own() -> None:
    """A thousand slots of a wide layer are zero pages until they are filled."""

    def resident_bytes() -> int:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    slots = AdapterSlots(1024, 64, torch.bfloat16, torch.device("cpu"))
    before = resident_bytes()
    weights = slots.linear("wide", 8192, 8192, lambda: (torch.empty(0), None))
    growth = resident_bytes() - before
    assert weights.a.nbytes + weights.b.nbytes == 2 * 1024 * 64 * 8192 * 2
    assert growth < weights.a.nbytes // 8
    weights.a.add_(0.0)  # written, they would be seen
    assert resident_bytes() - before > weights.a.nbytes // 2  # some of it may have been there, of what was freed

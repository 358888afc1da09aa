"""Adapters of routed experts: apart, stacked in one parameter, and in slots."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest
import torch
from lora_files import write
from torch import Tensor

from quire_interfaces import CheckpointError
from quire_lora import AdapterSlots, ExpertSite, LinearSite, read_adapter
from quire_lora.adapter import Adapter, LinearAdapter, stack_experts

EXPERTS, HIDDEN, INNER = 3, 6, 4
LAYER = "model.layers.0.mlp.experts"
PREFIX = "base_model.model."
SHAPES = {"gate_proj": (INNER, HIDDEN), "up_proj": (INNER, HIDDEN), "down_proj": (HIDDEN, INNER)}


def names(role: str) -> tuple[str, ...]:
    return tuple(f"{LAYER}.{expert}.{role}" for expert in range(EXPERTS))


def make_slots(num_slots: int = 2) -> AdapterSlots:
    slots = AdapterSlots(num_slots, 4, torch.float32, torch.device("cpu"))
    slots.capture_refusal = None
    linears = {
        name: LinearSite(shape=shape, weights=None, base=lambda shape=shape: (torch.zeros(shape), None), expert=expert)
        for role, shape in SHAPES.items()
        for expert, name in enumerate(names(role))
    }
    slots.routed_experts(
        LAYER, ExpertSite(gate=names("gate_proj"), up=names("up_proj"), down=names("down_proj")), linears
    )
    return slots


def rename(name: str, tensor: Tensor) -> Iterable[tuple[str, Tensor]]:
    """As a network does whose checkpoint stacks experts: [E, 2 I, H] of gate and up, [E, H, I] of down."""
    if name == f"{LAYER}.gate_up_proj.weight":
        if tensor.shape[:2] != (EXPERTS, 2 * INNER):
            raise ValueError(tensor.shape)
        gate, up = tensor.split(INNER, dim=1)
        for role, part in (("gate_proj", gate), ("up_proj", up)):
            yield from ((f"{each}.weight", part[i]) for i, each in enumerate(names(role)))
    elif name == f"{LAYER}.down_proj.weight":
        if tensor.shape[0] != EXPERTS:
            raise ValueError(tensor.shape)
        yield from ((f"{each}.weight", tensor[i]) for i, each in enumerate(names("down_proj")))
    else:
        yield name, tensor


def renamed_parameter(name: str, tensor: Tensor) -> Iterable[tuple[str, Tensor]]:
    """`rename` for names with and without ".weight", as stacked parameters are called."""
    return rename(name if name.endswith(".weight") else f"{name}.weight", tensor)


def apart(role: str, experts: Iterable[int] = range(EXPERTS), rank: int = 2) -> dict[str, Tensor]:
    outputs, inputs = SHAPES[role]
    tensors = {}
    for expert in experts:
        tensors[f"{PREFIX}{LAYER}.{expert}.{role}.lora_A.weight"] = torch.randn(rank, inputs)
        tensors[f"{PREFIX}{LAYER}.{expert}.{role}.lora_B.weight"] = torch.randn(outputs, rank)
    return tensors


# One expert after the other.


def test_experts_apart_become_one_adapter_of_their_layer(tmp_path: Path) -> None:
    tensors = apart("gate_proj") | apart("down_proj")
    adapter = read_adapter(write(tmp_path, tensors, target_modules=["gate_proj", "down_proj"]), make_slots())
    assert adapter.linears == {}
    experts = adapter.experts[LAYER]
    assert experts.up is None
    assert experts.gate is not None
    assert experts.down is not None
    assert experts.gate.a.shape == (EXPERTS, 2, HIDDEN)
    assert experts.down.b.shape == (EXPERTS, 2, HIDDEN)
    for expert in range(EXPERTS):
        key = f"{PREFIX}{LAYER}.{expert}.gate_proj"
        assert torch.equal(experts.gate.a[expert], tensors[f"{key}.lora_A.weight"])
        assert torch.equal(experts.gate.b[expert], 2 * tensors[f"{key}.lora_B.weight"].T)
    assert adapter.rank == 2
    assert adapter.num_bytes >= sum(tensor.nbytes for tensor in tensors.values())


def test_an_expert_that_is_missing_among_others_is_named(tmp_path: Path) -> None:
    tensors = apart("up_proj", experts=[0, 2])
    with pytest.raises(CheckpointError, match=re.escape(f"1 missing: {LAYER}.1.up_proj.lora_A.weight")):
        read_adapter(write(tmp_path, tensors, target_modules=["up_proj"]), make_slots())


def test_experts_may_have_different_ranks(tmp_path: Path) -> None:
    tensors = apart("down_proj", experts=[0, 1], rank=1) | apart("down_proj", experts=[2], rank=3)
    fields = {"r": 1, "rank_pattern": {r"experts\.2\.down_proj": 3}, "alpha_pattern": {r"experts\.2\.down_proj": 12}}
    adapter = read_adapter(write(tmp_path, tensors, target_modules=["down_proj"], **fields), make_slots())
    down = adapter.experts[LAYER].down
    assert down is not None
    assert down.ranks.tolist() == [1, 1, 3]
    assert not down.a[0, 1:].any()
    assert torch.equal(down.b[2], 4 * tensors[f"{PREFIX}{LAYER}.2.down_proj.lora_B.weight"].T)


# Stacked.


def test_stacked_experts_are_taken_apart(tmp_path: Path) -> None:
    """PEFT's ParamWrapper: A is [E r, I] and B [O, r E], whose columns go over experts within a rank."""
    rank = 2
    a, b = torch.randn(EXPERTS * rank, HIDDEN), torch.randn(2 * INNER, rank * EXPERTS)
    tensors = {f"{PREFIX}{LAYER}.lora_A.weight": a, f"{PREFIX}{LAYER}.lora_B.weight": b}
    folder = write(tmp_path, tensors, target_modules=[], target_parameters=["experts.gate_up_proj"])
    experts = read_adapter(folder, make_slots(), renamed_parameter).experts[LAYER]
    assert experts.down is None
    assert experts.gate is not None
    assert experts.up is not None
    for expert in range(EXPERTS):
        delta = 2 * b.view(2 * INNER, rank, EXPERTS)[:, :, expert] @ a.view(EXPERTS, rank, HIDDEN)[expert]
        ours = torch.cat([each.b[expert].T @ each.a[expert] for each in (experts.gate, experts.up)])
        torch.testing.assert_close(ours, delta)


def test_of_two_stacked_parameters_the_inner_one_comes_first(tmp_path: Path) -> None:
    rank, tensors = 1, {}
    for name, outputs, inputs in ((f"{LAYER}.base_layer", 2 * INNER, HIDDEN), (LAYER, HIDDEN, INNER)):
        tensors[f"{PREFIX}{name}.lora_A.weight"] = torch.randn(EXPERTS * rank, inputs)
        tensors[f"{PREFIX}{name}.lora_B.weight"] = torch.randn(outputs, rank * EXPERTS)
    parameters = ["experts.down_proj", "experts.gate_up_proj"]
    folder = write(tmp_path, tensors, r=1, target_modules=[], target_parameters=parameters)
    experts = read_adapter(folder, make_slots(), renamed_parameter).experts[LAYER]
    assert experts.gate is not None
    assert experts.down is not None
    outer = tensors[f"{PREFIX}{LAYER}.lora_A.weight"]
    inner = tensors[f"{PREFIX}{LAYER}.base_layer.lora_A.weight"]
    assert torch.equal(experts.down.a[:, 0], outer)
    assert torch.equal(experts.gate.a[:, 0], inner)


def test_a_stacked_adapter_of_another_shape_is_named(tmp_path: Path) -> None:
    tensors = {
        f"{PREFIX}{LAYER}.lora_A.weight": torch.randn(EXPERTS * 2, HIDDEN + 1),
        f"{PREFIX}{LAYER}.lora_B.weight": torch.randn(2 * INNER, 2 * EXPERTS),
    }
    folder = write(tmp_path, tensors, target_modules=[], target_parameters=["experts.gate_up_proj"])
    with pytest.raises(CheckpointError, match="which is not rank 2 for each of its experts"):
        read_adapter(folder, make_slots(), renamed_parameter)


def test_a_stacked_parameter_without_tensors_is_missing(tmp_path: Path) -> None:
    tensors = {
        f"{PREFIX}{LAYER}.lora_A.weight": torch.randn(EXPERTS * 2, HIDDEN),
        f"{PREFIX}{LAYER}.lora_B.weight": torch.randn(2 * INNER, 2 * EXPERTS),
    }
    parameters = ["experts.gate_up_proj", "experts.down_proj"]
    folder = write(tmp_path, tensors, target_modules=[], target_parameters=parameters)
    with pytest.raises(CheckpointError, match=re.escape(f"1 missing: {LAYER}.down_proj (lora_A, lora_B)")):
        read_adapter(folder, make_slots(), renamed_parameter)


# In slots.


def test_slots_keep_the_experts_of_what_is_in_them(tmp_path: Path) -> None:
    slots = make_slots()
    held = slots.of_experts(LAYER)
    adapter = read_adapter(write(tmp_path, apart("gate_proj"), target_modules=["gate_proj"]), slots)
    slots.place(1, "experts", adapter)
    assert held.keys() == {1}, "filled in place: layers keep the dictionary"
    assert held[1].gate is adapter.experts[LAYER].gate
    assert slots.captured_tokens_of(np.array([0], dtype=np.int32), 1) is None, "none can while one is in any slot"
    slots.place(1, "nothing", Adapter())
    assert held == {}
    assert slots.captured_tokens_of(np.array([0], dtype=np.int32), 1) is not None


def test_stacking_leaves_zeros_where_an_expert_has_nothing() -> None:
    some = LinearAdapter(a=torch.randn(2, HIDDEN), b=torch.randn(2, INNER), scale=torch.rand(INNER))
    more = LinearAdapter(a=torch.randn(3, HIDDEN), b=torch.randn(3, INNER), shift=torch.randn(INNER))
    stacked = stack_experts([some, None, more])
    assert stacked is not None
    assert stacked.ranks.tolist() == [2, 0, 3]
    assert stacked.adjusted.tolist() == [1, 0, 1]
    assert not stacked.a[1].any()
    assert not stacked.a[0, 2:].any()
    assert torch.equal(stacked.b[2], more.b)
    assert torch.equal(stacked.scale[0], some.scale)
    assert torch.equal(stacked.scale[2], torch.ones(INNER))
    assert torch.equal(stacked.shift[2], more.shift)
    assert not stacked.shift[0].any()
    assert stack_experts([None, None]) is None


def test_stacks_without_scales_take_no_room_for_them() -> None:
    stacked = stack_experts([LinearAdapter(a=torch.randn(1, HIDDEN), b=torch.randn(1, INNER))])
    assert stacked is not None
    assert stacked.scale.shape == stacked.shift.shape == (1, 0)

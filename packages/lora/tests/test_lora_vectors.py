"""What adapters have besides two matrices: magnitudes (DoRA), biases of their own, and biases of the layer."""

from __future__ import annotations

import contextlib
import dataclasses
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from lora_files import HIDDEN, SHAPES, make_slots, tensors_of, write
from torch import Tensor
from torch._subclasses import FakeTensorMode

from quire_interfaces import CheckpointError, SchedulerStats
from quire_lora import AdapterRuntime, AdapterSlots, AdapterStore, read_adapter

PREFIX = "base_model.model."
NAME = "model.layers.0.q_proj"
OUTPUTS = SHAPES[NAME][0]
KEY = f"{PREFIX}{NAME}"


def one(rank: int = 2, **parts: Tensor) -> dict[str, Tensor]:
    """The tensors of an adapter of one layer, with further parts of it."""
    return tensors_of([NAME], rank) | {f"{KEY}.{part}": tensor for part, tensor in parts.items()}


def result_of(slots: AdapterSlots, folder: Path, x: Tensor) -> Tensor:
    """What the layer gives for `x` [N, HIDDEN] with the adapter of a folder on all rows."""
    slots.place(0, "v", read_adapter(folder, slots))
    site = slots.linears[NAME]
    weight, bias = site.base()
    out = x @ weight.T if bias is None else x @ weight.T + bias
    tokens = slots.tokens_of(np.zeros(len(x), dtype=np.int32))
    assert tokens is not None
    assert site.weights is not None
    slots.add(out, x, site.weights, tokens)
    return out


def matrices(tensors: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    return tensors[f"{KEY}.lora_A.weight"].double(), tensors[f"{KEY}.lora_B.weight"].double()


def test_magnitudes_set_the_length_of_each_output(tmp_path: Path) -> None:
    """DoRA (Liu et al. 2024, arXiv:2402.09353, eq. 5): m (W + s B A) / ||W + s B A||; biases stay."""
    magnitude = torch.rand(OUTPUTS) + 0.5
    tensors = one(lora_magnitude_vector=magnitude)
    slots, x = make_slots(), torch.randn(5, HIDDEN)
    folder = write(tmp_path, tensors, target_modules=["0.q_proj"], use_dora=True)
    weight, bias = slots.linears[NAME].base()
    assert bias is not None
    a, b = matrices(tensors)
    merged = weight.double() + 2 * b @ a
    merged *= (magnitude.double() / merged.norm(dim=1))[:, None]
    expected = x.double() @ merged.T + bias.double()
    torch.testing.assert_close(result_of(slots, folder, x).double(), expected, rtol=1e-4, atol=1e-4)


def test_magnitudes_and_biases_of_a_devices_layers(tmp_path: Path) -> None:
    """Tensors of a pretended GPU refuse to be mixed with those of the host, as those of a real one do."""
    parts = {"lora_magnitude_vector": torch.rand(OUTPUTS), "bias": torch.rand(OUTPUTS)}
    folder = write(tmp_path, one(**parts), target_modules=["0.q_proj"], use_dora=True, bias="lora_only")
    slots = make_slots()
    with contextlib.ExitStack() as from_here:

        def base() -> tuple[Tensor, Tensor]:
            from_here.enter_context(FakeTensorMode(allow_non_fake_inputs=True))  # files cannot be read in it
            return torch.empty(OUTPUTS, HIDDEN, device="cuda"), torch.empty(OUTPUTS, device="cuda")

        slots.linears[NAME] = dataclasses.replace(slots.linears[NAME], base=base)
        adapter = read_adapter(folder, slots).linears[NAME]
    tensors = [adapter.a, adapter.b, adapter.scale, adapter.shift]
    assert {tensor.device.type for tensor in tensors if tensor is not None} == {"cpu"}


def test_the_bias_of_b_is_scaled_as_its_matrix(tmp_path: Path) -> None:
    own = torch.randn(OUTPUTS)
    tensors = one(**{"lora_B.bias": own})
    slots, x = make_slots(), torch.randn(5, HIDDEN)
    folder = write(tmp_path, tensors, target_modules=["0.q_proj"], lora_bias=True)
    weight, bias = slots.linears[NAME].base()
    assert bias is not None
    a, b = matrices(tensors)
    expected = x.double() @ (weight.double() + 2 * b @ a).T + bias.double() + 2 * own.double()
    torch.testing.assert_close(result_of(slots, folder, x).double(), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("part", ["bias", "base_layer.bias"])
def test_a_trained_bias_takes_the_place_of_the_layers(tmp_path: Path, part: str) -> None:
    trained = torch.randn(OUTPUTS)
    tensors = one(**{part: trained})
    slots, x = make_slots(), torch.randn(5, HIDDEN)
    folder = write(tmp_path, tensors, target_modules=["0.q_proj"], bias="lora_only")
    weight, _ = slots.linears[NAME].base()
    a, b = matrices(tensors)
    expected = x.double() @ (weight.double() + 2 * b @ a).T + trained.double()
    torch.testing.assert_close(result_of(slots, folder, x).double(), expected, rtol=1e-4, atol=1e-4)


def test_a_layer_may_have_a_trained_bias_alone(tmp_path: Path) -> None:
    trained, other = torch.randn(OUTPUTS), "model.layers.1.q_proj"
    tensors = tensors_of([other]) | {f"{KEY}.bias": trained}
    slots, x = make_slots(), torch.randn(5, HIDDEN)
    folder = write(tmp_path, tensors, target_modules=["1.q_proj"], bias="all")
    adapter = read_adapter(folder, slots).linears[NAME]
    assert adapter.rank == 0
    weight, _ = slots.linears[NAME].base()
    expected = x @ weight.T + trained
    torch.testing.assert_close(result_of(slots, folder, x), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("part", ["lora_magnitude_vector", "lora_B.bias", "bias"])
def test_vectors_of_another_length_are_named(tmp_path: Path, part: str) -> None:
    folder = write(tmp_path, one(**{part: torch.ones(OUTPUTS + 1)}), target_modules=["0.q_proj"])
    with pytest.raises(CheckpointError, match=re.escape(f"{NAME}.{part} is [5], should be [4]")):
        read_adapter(folder, make_slots())


def test_a_bias_of_no_layer_is_not_known(tmp_path: Path) -> None:
    tensors = one() | {f"{PREFIX}model.layers.7.q_proj.bias": torch.ones(OUTPUTS)}
    with pytest.raises(CheckpointError, match=r"1 not known: model\.layers\.7\.q_proj\.bias"):
        read_adapter(write(tmp_path, tensors, target_modules=["0.q_proj"]), make_slots())


def test_half_of_a_pair_is_missing_the_other_half(tmp_path: Path) -> None:
    tensors = one()
    del tensors[f"{KEY}.lora_B.weight"]
    with pytest.raises(CheckpointError, match=re.escape(f"missing: {NAME}.lora_B.weight")):
        read_adapter(write(tmp_path, tensors, target_modules=["0.q_proj"]), make_slots())


# At run time.


def test_a_runtime_fills_slots_from_its_store(tmp_path: Path) -> None:
    slots = make_slots()
    store = AdapterStore(slots, lambda name, tensor: [(name, tensor)], max_adapters=2)
    runtime = AdapterRuntime(slots, store)
    version = store.load("style", str(write(tmp_path / "a", tensors_of()))).result().version
    runtime.place(1, version)
    assert slots.versions == [None, version]
    with pytest.raises(RuntimeError, match="is not in host memory"):
        runtime.place(0, "no such version")
    assert slots.versions == [None, version]
    store.close()


def test_a_runtime_that_never_merges_says_so() -> None:
    slots = make_slots()
    store = AdapterStore(slots, lambda name, tensor: [(name, tensor)], max_adapters=1)
    runtime = AdapterRuntime(slots, store, merge_after=0)
    stats = SchedulerStats()
    for _ in range(5):
        assert runtime.merge_for_step(np.array([0, 0], dtype=np.int32)) == -1
    runtime.add_stats(stats)
    assert stats.num_adapter_merges_total == 0
    assert not runtime.changes_vocabulary(np.array([0, 1], dtype=np.int32))
    store.close()

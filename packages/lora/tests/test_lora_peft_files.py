"""Reading adapters: what the files say, and what is said about files that do not fit. Parity with PEFT is tested where
networks are."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lora_files import HIDDEN, SHAPES, VOCAB, make_slots, tensors_of, write

from quire_interfaces import CheckpointError
from quire_lora import read_adapter
from quire_lora.adapter import narrowed

PREFIX = "base_model.model."


@pytest.mark.parametrize(
    ("fields", "factor"),
    [
        ({}, 2.0),
        ({"use_rslora": True}, 4 / math.sqrt(2)),
        ({"alpha_pattern": {"q_proj": 3}}, 1.5),
        ({"alpha_pattern": {r"layers\.0\.q_proj": 5}}, 2.5),
        ({"rank_pattern": {"k_proj": 2}, "r": 2, "alpha_pattern": {"proj": 3}}, 2.0),
    ],
)
def test_scaling_is_part_of_b(tmp_path: Path, fields: dict[str, Any], factor: float) -> None:
    tensors = tensors_of()
    adapter = read_adapter(write(tmp_path, tensors, **fields), make_slots())
    name = "model.layers.0.q_proj"
    assert torch.equal(adapter.linears[name].a, tensors[f"{PREFIX}{name}.lora_A.weight"])
    assert torch.allclose(adapter.linears[name].b, tensors[f"{PREFIX}{name}.lora_B.weight"].T * factor)
    assert adapter.linears.keys() == SHAPES.keys()
    assert adapter.rank == 2
    assert adapter.num_bytes == sum(tensor.nbytes for tensor in tensors.values())


@pytest.mark.parametrize("dtype", [torch.int8, torch.float8_e4m3fn])
@pytest.mark.parametrize("by_row", [False, True])
def test_quantized_adapters_are_what_they_stand_for(tmp_path: Path, dtype: torch.dtype, by_row: bool) -> None:
    stored, wide = {}, {}
    for name, tensor in tensors_of().items():
        largest = tensor.abs().amax(1, keepdim=True) if by_row else tensor.abs().max().view(1)
        scale = largest / (127 if dtype == torch.int8 else 448)
        elements = (tensor / scale).round().to(dtype) if dtype == torch.int8 else (tensor / scale).to(dtype)
        stored |= {name: elements, f"{name}_scale": scale}
        wide[name] = elements.float() * scale
    slots = make_slots()
    found, wanted = (read_adapter(write(tmp_path, tensors), slots) for tensors in (stored, wide))
    for name, one in wanted.linears.items():
        assert torch.equal(found.linears[name].a, one.a)
        assert torch.equal(found.linears[name].b, one.b)


@pytest.mark.parametrize("lora_dtype", ["int8", "fp8_e4m3"])
def test_narrow_slots_keep_what_is_stored_so_and_round_the_rest(tmp_path: Path, lora_dtype: str) -> None:
    """The former give the bits of slots in the network's dtype, with DoRA too; the LM head's stays wide."""
    slots, wide_slots = make_slots(lora_dtype=lora_dtype), make_slots()
    for name in SHAPES:  # of the same network
        slots.linears[name] = replace(slots.linears[name], base=wide_slots.linears[name].base)
    dtype, tensors = slots.narrow_dtype, tensors_of()
    assert dtype is not None
    tensors |= {f"{PREFIX}lm_head.lora_A.weight": torch.randn(2, HIDDEN)}
    tensors |= {f"{PREFIX}lm_head.lora_B.weight": torch.randn(VOCAB, 2)}
    stored = {name: (tensor * 30).clamp(-128, 127).to(dtype) for name, tensor in tensors.items()}
    stored[f"{PREFIX}model.layers.0.q_proj.lora_A.weight"][0, 0] = -128
    stored |= {f"{name}_scale": torch.rand(len(tensor)) for name, tensor in tensors.items()}
    stored |= {f"{PREFIX}{name}.lora_magnitude_vector": torch.rand(shape[0]) for name, shape in SHAPES.items()}
    folder = write(tmp_path, stored, target_modules=["q_proj", "k_proj", "lm_head"], use_dora=True)
    narrow, wide = (read_adapter(folder, each) for each in (slots, wide_slots))
    for name, linear in narrow.linears.items():
        assert linear.a.dtype == linear.b.dtype == dtype
        assert torch.equal(linear.a, stored[f"{PREFIX}{name}.lora_A.weight"])
        slots.place(0, "1", narrow)
        weights = slots.linears[name].weights
        assert weights is not None
        a, b = weights.matrices(0, 2, torch.float32)
        assert torch.equal(a, wide.linears[name].a)
        assert torch.equal(b, wide.linears[name].b)
    assert torch.equal(narrow.lm_head.b, wide.lm_head.b)

    folder = write(tmp_path, tensors_of())
    narrow, wide = (read_adapter(folder, each) for each in (slots, wide_slots))
    for name, linear in narrow.linears.items():
        a, b = linear.product(torch.device("cpu"))
        exact = wide.linears[name]
        for found, wanted, dim in ((a, exact.a, 1), (b, exact.b, 0)):
            largest = wanted.abs().amax(dim, keepdim=True)
            # int8: half a step; e4m3: half of the last of four bits, or of a step below the least normal number.
            bound = largest / 254 if dtype == torch.int8 else torch.maximum(wanted.abs() / 16, largest / 448 / 1024)
            assert ((found - wanted).abs() <= bound + 1e-6).all()
        assert not torch.equal(a, exact.a)

    broken, name = tensors_of(), "model.layers.0.q_proj.lora_A"
    broken[f"{PREFIX}{name}.weight"][0, 0] = float("nan")
    with pytest.raises(CheckpointError, match=f"1 with numbers that are not finite: {name}"):
        read_adapter(write(tmp_path, broken), slots)
    for key in stored.keys() & {f"{PREFIX}{name}.weight_scale", f"{PREFIX}model.layers.0.q_proj.lora_magnitude_vector"}:
        broken = {**stored, key: torch.full_like(stored[key], float("inf"))}
        with pytest.raises(CheckpointError, match=r"with numbers that are not finite: model.layers.0.q_proj.lora_"):
            read_adapter(write(tmp_path, broken, target_modules=["q_proj", "k_proj", "lm_head"], use_dora=True), slots)

    values, scale = narrowed(torch.tensor([[0.0, 1e-45], [0.5, -1.0]]), torch.ones(2), dtype)
    assert torch.equal((values.float() * scale[:, None])[0], torch.zeros(2))


def test_adapters_kept_in_float8_and_what_is_wrong_with_others(tmp_path: Path) -> None:
    tensors, slots = tensors_of(), make_slots()
    narrow = {name: tensor.to(torch.float8_e4m3fn) for name, tensor in tensors.items()}
    name = "model.layers.1.q_proj"
    found = read_adapter(write(tmp_path, narrow), slots).linears[name]
    assert torch.equal(found.a, narrow[f"{PREFIX}{name}.lora_A.weight"].float())
    whole = {key: (tensor * 9).to(torch.int8) for key, tensor in tensors.items()}
    with pytest.raises(CheckpointError, match=r"8 not known: .*lora_A.weight"):
        read_adapter(write(tmp_path, whole), slots)
    scale = {f"{PREFIX}{name}.lora_A.weight_scale": torch.ones(5)}
    with pytest.raises(CheckpointError, match=r"is \[2, 6\] in float8_e4m3fn and its scale \[5\], should be int8 or"):
        read_adapter(write(tmp_path, narrow | scale), slots)


def test_everything_that_does_not_fit_is_listed_at_once(tmp_path: Path) -> None:
    tensors = tensors_of()
    del tensors[f"{PREFIX}model.layers.1.k_proj.lora_A.weight"]
    tensors[f"{PREFIX}model.layers.0.k_proj.lora_B.weight"] = torch.zeros(3, 2)
    tensors[f"{PREFIX}model.layers.0.mlp.lora_A.weight"] = torch.zeros(2, HIDDEN)
    tensors[f"{PREFIX}model.layers.0.mlp.lora_B.weight"] = torch.zeros(4, 2)
    tensors["something.else"] = torch.zeros(1)
    for which in "AB":
        del tensors[f"{PREFIX}model.layers.1.q_proj.lora_{which}.weight"]
    with pytest.raises(CheckpointError) as caught:
        read_adapter(write(tmp_path, tensors), make_slots())
    message = str(caught.value)
    assert "2 missing: model.layers.1.k_proj.lora_A.weight, model.layers.1.q_proj.lora_A.weight" in message
    assert "2 not known: something.else, model.layers.0.mlp.lora_A.weight" in message
    assert (
        "1 of the wrong shape: model.layers.0.k_proj.lora_B.weight times lora_A.weight is [3, 6], should be [2, 6]"
        in (message)
    )


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        ({"peft_type": "LOHA"}, "peft_type is 'LOHA'; only LORA"),
        ({"trainable_token_indices": [1, 2]}, "trainable_token_indices ([1, 2]) is set, which is not supported"),
        (
            {"trainable_token_indices": [1], "layer_replication": [[0, 1]]},
            "trainable_token_indices ([1]), layer_replication ([[0, 1]]) are set",
        ),
        ({"from_the_future": 1}, "adapter_config.json: from_the_future (1) is set, which is not supported; merge"),
        ({"alora_invocation_tokens": [7]}, "alora_invocation_tokens ([7]) is set"),
        ({"use_qalora": True}, "use_qalora (true) is set"),
        (
            {"init_lora_weights": "pissa_niter_4"},
            "init_lora_weights is 'pissa_niter_4', which changes the network's own",
        ),
        ({"r": 0}, "r must be a whole number of at least 1, got 0"),
        ({"r": True}, "r must be a whole number of at least 1, got True"),
        ({"lora_alpha": "x"}, "lora_alpha must be a number above 0, got 'x'"),
        ({"bias": "some"}, "bias must be none, all or lora_only"),
        ({"target_modules": "(q_proj"}, "target_modules is no regular expression"),
        ({"target_modules": [1]}, "target_modules must be a name or a list of names"),
        ({"rank_pattern": {"q_proj": -1}}, "rank_pattern must map names to numbers above 0"),
        ({"r": 3}, r"lora_A is [2, 6] and lora_B is [4, 2], should be of rank 3"),
        ({"target_modules": ["q_proj", "k_proj", "lm_head"], "rank_pattern": {"q_proj": 5}}, "should be of rank 5"),
    ],
)
def test_what_is_refused_is_named(tmp_path: Path, fields: dict[str, Any], complaint: str) -> None:
    with pytest.raises(CheckpointError, match=re.escape(complaint)):
        read_adapter(write(tmp_path, tensors_of(), **fields), make_slots())


def test_layers_that_the_configuration_leaves_out_are_not_missing(tmp_path: Path) -> None:
    first = [name for name in SHAPES if ".0." in name]
    for fields in (
        {"layers_to_transform": [0]},
        {"layers_to_transform": 0, "target_modules": "all-linear"},
        {"target_modules": r".*\.0\.._proj"},
        {"exclude_modules": r".*\.1\..*"},
        {"exclude_modules": ["1.q_proj", "layers.1.k_proj"]},
    ):
        adapter = read_adapter(write(tmp_path, tensors_of(first), **fields), make_slots())
        assert set(adapter.linears) == set(first)
    with pytest.raises(CheckpointError, match="2 missing"):
        read_adapter(write(tmp_path, tensors_of(first)), make_slots())


def test_ranks_above_the_bound_say_which_flag_helps(tmp_path: Path) -> None:
    folder = write(tmp_path, tensors_of(rank=5), r=5)
    with pytest.raises(CheckpointError, match="start it with --max-lora-rank 5"):
        read_adapter(folder, make_slots())
    assert read_adapter(folder, make_slots(max_rank=5)).rank == 5


def test_fused_matrices_become_the_layers_they_are_made_of(tmp_path: Path) -> None:
    a, b = torch.randn(2, HIDDEN), torch.randn(6, 2)
    tensors = {f"{PREFIX}model.layers.0.qk_proj.lora_{which}.weight": each for which, each in (("A", a), ("B", b))}

    def rename(name: str, tensor: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
        if "qk_proj" not in name:
            return [(name, tensor)]
        return [
            (name.replace("qk_", part), piece) for part, piece in zip(("q_", "k_"), tensor.split([4, 2]), strict=True)
        ]

    folder = write(tmp_path, tensors, target_modules=["qk_proj"])
    adapter = read_adapter(folder, make_slots(), rename)
    assert torch.equal(adapter.linears["model.layers.0.q_proj"].b, 2 * b[:4].T)
    assert torch.equal(adapter.linears["model.layers.0.k_proj"].b, 2 * b[4:].T)
    assert torch.equal(adapter.linears["model.layers.0.k_proj"].a, a)

    def transposed(name: str, tensor: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
        return rename(name, tensor.T)

    again = read_adapter(folder, make_slots(), transposed)
    assert torch.equal(again.linears["model.layers.0.q_proj"].b, 2 * b[:4].T)


def test_embedding_and_head(tmp_path: Path) -> None:
    a, b = torch.randn(2, VOCAB), torch.randn(HIDDEN, 2)
    head = torch.randn(VOCAB, HIDDEN)
    tensors = {
        f"{PREFIX}model.embed_tokens.lora_embedding_A": a,
        f"{PREFIX}model.embed_tokens.lora_embedding_B": b,
        f"{PREFIX}lm_head.weight": head,
    }
    slots = make_slots()
    adapter = read_adapter(
        write(tmp_path, tensors, target_modules=["embed_tokens"], modules_to_save=["lm_head"]), slots
    )
    assert adapter.changes_vocabulary
    slots.place(1, "v", adapter)
    ids, own = torch.tensor([3, 4, 3]), torch.randn(3, HIDDEN)
    tokens = slots.tokens_of(np.array([1, -1, 0], dtype=np.int32))
    logit_tokens = slots.logit_tokens_of(np.array([-1, 1], dtype=np.int32))
    assert tokens is not None
    assert logit_tokens is not None
    assert slots.changes_vocabulary(np.array([0, 1]))
    assert not slots.changes_vocabulary(np.array([0, -1]))
    embedded = own.clone()
    slots.embed(embedded, ids, tokens)
    assert torch.allclose(embedded[0], own[0] + 2 * a[:, 3] @ b.T)
    assert torch.equal(embedded[1:], own[1:])
    hidden, logits = torch.randn(2, HIDDEN), torch.randn(2, VOCAB)
    changed = logits.clone()
    slots.logits(changed, hidden, logit_tokens)
    assert torch.equal(changed[0], logits[0])
    assert torch.allclose(changed[1], hidden[1] @ head.T)
    tensors[f"{PREFIX}lm_head.weight"] = torch.zeros(VOCAB + 1, HIDDEN)
    with pytest.raises(CheckpointError, match=re.escape("lm_head.weight is [12, 6], should be [11, 6]")):
        read_adapter(write(tmp_path, tensors, target_modules=[]), slots)


def test_broken_folders_are_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=re.escape("has no adapter_config.json")):
        read_adapter(tmp_path, make_slots())
    folder = write(tmp_path / "x", tensors_of())
    (folder / "adapter_model.safetensors").write_bytes(b"no tensors")
    with pytest.raises(CheckpointError, match=re.escape("adapter_model.safetensors cannot be read")):
        read_adapter(folder, make_slots())
    (folder / "adapter_model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"has no adapter_model\.safetensors; load the adapter with PEFT"):
        read_adapter(folder, make_slots())
    (folder / "adapter_model.bin").write_bytes(b"pickle")
    with pytest.raises(
        CheckpointError, match=r"but adapter_model\.bin, a format that can run code .* safe_serialization"
    ):
        read_adapter(folder, make_slots())
    (folder / "adapter_config.json").write_text("{")
    with pytest.raises(CheckpointError, match="is not JSON"):
        read_adapter(folder, make_slots())
    with pytest.raises(CheckpointError, match="is empty"):
        read_adapter(write(folder, {}, target_modules=[]), make_slots())

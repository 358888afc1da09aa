"""Checkpoints of compressed-tensors with Hadamard rotations while the model runs: against the library's own hooks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.transform import TransformConfig, apply_transform_config
from compressed_tensors.transform.utils.hadamard import deterministic_hadamard_matrix
from models_quantized import TOKENS, check_that_bits_do_not_follow_chunks, logits_of, make
from safetensors.torch import load_file, save_file

from quire_interfaces import CheckpointError
from quire_models import ModelConfig, load_model

DOWN = "model.layers.0.mlp.down_proj"


def place(targets: list[str], location: str, **more: Any) -> dict[str, Any]:
    return {"targets": targets, "location": location, "inverse": False, "ignore": [], **more}


def scheme(*places: dict[str, Any], head_dim: int | None = None, **more: Any) -> dict[str, Any]:
    return {"type": "hadamard", "apply": list(places), "randomize": False, "head_dim": head_dim, **more}


GROUPS = {
    "R4": scheme(place(["re:.*down_proj$"], "input"), head_dim=64),
    "turned": scheme(place(["re:.*layers.1.*(q|k)_proj$"], "output"), place(["Linear"], "input",
                     ignore=["lm_head", "re:.*(down|gate|up)_proj$"])),
}  # fmt: skip


def with_transforms(folder: Path, groups: dict[str, Any]) -> None:
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["transform_config"] = {"config_groups": groups}
    (folder / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize("name", ["packed", "packed ordered", "w8a8"])
def test_logits_are_those_of_the_library(name: str, tmp_path: Path) -> None:
    oracle = make(tmp_path, name).float()
    plain = logits_of(load_model(ModelConfig.from_path(tmp_path), tmp_path, dtype="float32"), TOKENS)
    # Rotations come before inputs are rounded: `prepend=True` puts the library's hooks in front.
    apply_transform_config(oracle, TransformConfig(config_groups=GROUPS))
    with_transforms(tmp_path, GROUPS)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors[f"{DOWN}.R4_input.weight"] = deterministic_hadamard_matrix(64, torch.float32)
    save_file(tensors, tmp_path / "model.safetensors")
    with torch.no_grad():
        expected = oracle(torch.tensor([TOKENS])).logits[0]
    model = load_model(ModelConfig.from_path(tmp_path), tmp_path, dtype="float32")
    got = logits_of(model, TOKENS)
    errors = (got - expected).abs().amax(1) / expected.abs().max()
    assert errors.median() <= 1e-3  # an input near the middle of two steps may be rounded the other way
    assert errors.max() <= (0.02 if name == "w8a8" else 1e-3)
    assert (plain - expected).abs().max() > 0.1 * expected.abs().max()
    check_that_bits_do_not_follow_chunks(model, TOKENS)


def test_what_cannot_be_done_is_named(tmp_path: Path) -> None:
    make(tmp_path, "packed")
    cases = {
        "type 'random-hadamard'": {"R4": {**GROUPS["R4"], "type": "random-hadamard"}},
        "not supported with randomize": {"R4": {**GROUPS["R4"], "randomize": True}},
        "the keys odd": {"R4": {**GROUPS["R4"], "odd": 1}},
        "precision 'bfloat16'": {"R4": {**GROUPS["R4"], "precision": "torch.bfloat16"}},
        r"q_proj: transform R rotates 96 of 128 features": {"R": scheme(place(["re:.*q_proj$"], "input"), head_dim=96)},
        r"down_proj: transform R at input rotates 320 of 320": {"R": scheme(place(["re:.*down_proj$"], "input"))},
        r"lm_head: transform_config has R \(input\)": {"R": scheme(place(["lm_head"], "input"))},
        r"down_proj: transform_config has R4 \(input\), R5 \(input\)": {"R4": GROUPS["R4"], "R5": GROUPS["R4"]},
    }
    for message, groups in cases.items():
        with_transforms(tmp_path, groups)
        with pytest.raises(CheckpointError, match=message.replace("R rotates", "R at input rotates")):
            load_model(ModelConfig.from_path(tmp_path), tmp_path)
    with_transforms(tmp_path, GROUPS)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors[f"{DOWN}.R4_input.weight"] = torch.ones(64, 64)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=f"{DOWN}.R4_input.weight is not Sylvester's"):
        load_model(ModelConfig.from_path(tmp_path), tmp_path)

"""Inkling 1 and 2 beyond their parity cases: experts as published in MXFP8, and a router whose scores are all 0."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from models_paged_driver import PagedDriver
from safetensors.torch import load_file, save_file
from torch import Tensor

from quire_models import ModelConfig, load_model
from quire_testkit.parity.cases import CASES
from quire_testkit.parity.oracle import write_checkpoint

TEXT = [3 + 7 * token % 190 for token in range(40)]
INKLING2 = "Inkling2ForCausalLM"
MXFP8 = {"scale_fmt": "ue8m0", "weight_block_size": [1, 32], "activation_scheme": "dynamic"}


def logits(folder: Path) -> Tensor:
    network: Any = load_model(ModelConfig.from_path(folder), folder, dtype="float32")
    driver = PagedDriver(network, block_size=4, shuffle=True)
    sequence = driver.add(TEXT)
    driver.run(sequence, 9)
    return torch.stack(sequence.logits)


def in_mxfp8(matrices: Tensor) -> tuple[Tensor, Tensor]:
    """Elements [E, N, K] float8 and scales [E, N, K / 32], powers of two as bytes."""
    blocks = matrices.unflatten(-1, (-1, 32))
    exponents = torch.ceil(torch.log2(blocks.abs().amax(-1) / 448))
    elements = (blocks / torch.exp2(exponents)[..., None]).to(torch.float8_e4m3fn)
    return elements.flatten(-2), (exponents + 127).to(torch.uint8)


@pytest.mark.parametrize("method", ["mxfp8", "fp8"])
def test_published_experts_in_mxfp8(method: str, tmp_path: Path) -> None:
    """Rows of gate and up take turns, those of their scales, too."""
    case = replace(CASES[INKLING2], fields={**CASES[INKLING2].fields, "intermediate_size": 32})
    write_checkpoint(tmp_path, INKLING2, case)
    file, found = tmp_path / "model.safetensors", dict[str, Tensor]()
    widened = load_file(file)
    for name in [name for name in widened if name.endswith((".w13_weight", ".w2_weight"))]:
        found[name], found[f"{name}_scale"] = in_mxfp8(widened[name])
        scale = torch.exp2(found[f"{name}_scale"].float() - 127)
        widened[name] = (found[name].float().unflatten(-1, (-1, 32)) * scale[..., None]).flatten(-2)
    assert len(found) == 4 * 5
    save_file(widened, file)
    expected = logits(tmp_path)
    save_file({**widened, **found}, file)
    config = json.loads((tmp_path / "config.json").read_text())
    said = {**MXFP8, "quant_method": method, "modules_to_not_convert": ["model.llm.layers.0.attn", "lm_head"]}
    (tmp_path / "config.json").write_text(json.dumps({**config, "quantization_config": said}))
    model = ModelConfig.from_path(tmp_path)
    assert model.quantization is not None
    assert model.quantization.name == "mxfp8, 8 bits, groups of 32"
    assert (logits(tmp_path) - expected).abs().max() < 1e-5 * expected.abs().max()


def test_experts_are_weighed_where_their_scores_are_all_zero(tmp_path: Path) -> None:
    oracle = write_checkpoint(tmp_path, "InklingForCausalLM", CASES["InklingForCausalLM"])
    network: Any = load_model(ModelConfig.from_path(tmp_path), tmp_path, dtype="float32")
    gate = next(module for name, module in oracle.named_modules() if name.endswith("mlp.gate"))
    low = torch.full((3, network.routers[0].shape[0]), -200.0)
    _, weights = network.routers[0].select(low)
    total = gate.route_scale * gate.global_scale.float()
    assert torch.allclose(weights, total / weights.shape[1])

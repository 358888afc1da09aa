"""Scales of fp8 KV caches: found under every name in use, put where keys and values are written, wrong ones refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from models_paged_driver import PagedDriver
from safetensors.torch import load_file, save_file

from quire_interfaces import CheckpointError
from quire_models import ModelConfig, load_model
from quire_ops.kv_reference import decode_row
from quire_testkit.checkpoints import make_checkpoint

NAMES = {
    "compressed-tensors": ("k_scale", "v_scale"),
    "vllm": ("attn.k_scale", "attn.v_scale"),
    "modelopt": ("k_proj.k_scale", "v_proj.v_scale"),
    "quark": ("k_proj.output_scale", "v_proj.output_scale"),
}


def checkpoint(folder: Path, scales: dict[str, torch.Tensor], **fields: object) -> Path:
    """A tiny checkpoint with these tensors besides its weights."""
    path = make_checkpoint(folder / "model", like="qwen3", dtype="float32", **fields)
    file = path / "model.safetensors"
    save_file(load_file(file) | scales, file, {"format": "pt"})
    return path


def load(path: Path, dtype: str | None = "fp8_e4m3") -> object:
    return load_model(ModelConfig.from_path(path), path, kv_cache_dtype=dtype)


@pytest.mark.parametrize("names", NAMES.values(), ids=NAMES)
@pytest.mark.parametrize("per_head", [False, True])
def test_every_name_in_use(tmp_path: Path, names: tuple[str, str], per_head: bool) -> None:
    heads = ModelConfig.from_path(checkpoint(tmp_path / "plain", {})).num_kv_heads
    key = torch.rand(heads, 1, 1) + 0.1 if per_head else torch.tensor([0.25])
    value = torch.tensor(3.0, dtype=torch.bfloat16)
    prefix = "model.layers.1.self_attn."
    extra = {prefix + names[0]: key, prefix + names[1]: value, prefix + "q_scale": torch.tensor(1.0)}
    model = load(checkpoint(tmp_path, extra))
    assert model.num_kv_scales == 1
    attentions = model._scope.attentions
    assert attentions["model.layers.0.self_attn."].kv_scale is None
    wanted = torch.stack((key.flatten().expand(heads), value.float().expand(heads)))
    assert torch.equal(attentions[prefix].kv_scale, wanted)
    assert load(tmp_path / "model", None)._scope.attentions[prefix].kv_scale is None


def test_one_scale_for_keys_and_values(tmp_path: Path) -> None:
    model = load(checkpoint(tmp_path, {"model.layers.0.self_attn.kv_scale": torch.tensor(0.5)}))
    assert (model._scope.attentions["model.layers.0.self_attn."].kv_scale == 0.5).all()


def test_scales_decide_what_the_cache_holds_and_not_what_it_means(tmp_path: Path) -> None:
    names = [f"model.layers.{layer}.self_attn.{kind}_scale" for layer in range(2) for kind in "kv"]
    path = checkpoint(tmp_path, {name: torch.tensor(0.125) for name in names})
    config = ModelConfig.from_path(path)
    prompt = list(range(3, 40))
    logits, caches = [], []
    for dtype, torch_dtype in (("fp8_e4m3", torch.float8_e4m3fn), (None, torch.float32)):
        model = load_model(config, path, dtype="float32", kv_cache_dtype=dtype)
        driver = PagedDriver(model, block_size=4, shuffle=True, cache_dtype=torch_dtype)
        seq = driver.add(prompt)
        driver.run(seq, chunk=7)
        logits.append(torch.stack(seq.logits))
        caches.append(driver.caches[0][seq.blocks[0]])
    stored, exact = caches[0][0, 0, 0], caches[1][0, 0, 0]
    assert torch.equal(stored.view(torch.uint8), (exact / 0.125).to(torch.float8_e4m3fn).view(torch.uint8))
    assert (decode_row(stored, 0.125) - exact).abs().max() <= exact.abs().max() / 16
    # Random weights: the logits differ, but not by more than rounding explains.
    assert 0 < (logits[0] - logits[1]).abs().max() < 0.2 * logits[1].abs().max()


@pytest.mark.parametrize(
    ("name", "scale", "message"),
    [
        ("model.layers.0.self_attn.k_scale", torch.ones(3), r"k_scale is \[3\]: a scale of the KV cache is one number"),
        ("model.layers.0.self_attn.v_scale", torch.tensor(0.0), r"v_scale is \[0\.0\]: .* positive numbers"),
        ("model.layers.0.self_attn.v_scale", torch.tensor(float("nan")), "positive numbers"),
        ("model.layers.7.self_attn.k_scale", torch.tensor(1.0), r"not known: model\.layers\.7\.self_attn\.k_scale"),
        ("model.layers.0.mlp.k_scale", torch.tensor(1.0), "not known"),
        ("model.layers.0.self_attn.o_proj.output_scale", torch.tensor(1.0), "not known"),
    ],
)
def test_what_makes_no_sense_is_named(tmp_path: Path, name: str, scale: torch.Tensor, message: str) -> None:
    path = checkpoint(tmp_path, {name: scale})
    with pytest.raises(CheckpointError, match=message):
        load(path)

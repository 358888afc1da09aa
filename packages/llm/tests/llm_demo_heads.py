"""The demo model with what it has no companions for: Medusa heads, and a layer for further tokens. Random, but near
enough to what it computes that some drafts are right."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from quire_demo_model import checkpoint_path

__all__ = ["write_adapter_of_layers", "write_medusa_heads", "write_with_mtp_layer"]


def write_medusa_heads(folder: Path, num_heads: int = 3) -> Path:
    """Medusa heads for the demo model, each of one residual layer and the embedding as LM head.

    Args:
        folder: Made, with config.json and medusa_lm_head.safetensors.

    Returns:
        `folder`.
    """
    folder.mkdir(exist_ok=True)
    embedding = load_file(checkpoint_path() / "model.safetensors")["model.embed_tokens.weight"]
    size, generator = embedding.shape[1], torch.Generator().manual_seed(0)
    tensors = {}
    for i in range(num_heads):
        tensors[f"{i}.0.linear.weight"] = torch.randn(size, size, generator=generator).mul(0.02).bfloat16()
        tensors[f"{i}.0.linear.bias"] = torch.zeros(size).bfloat16()
        tensors[f"{i}.1.weight"] = embedding.clone()
    save_file(tensors, folder / "medusa_lm_head.safetensors")
    (folder / "config.json").write_text(json.dumps({"medusa_num_heads": num_heads, "medusa_num_layers": 1}))
    return folder


def write_with_mtp_layer(folder: Path, *, has_experts: bool = False) -> Path:
    """The demo model as a GLM-4.5 without experts, whose function is the same, and one more layer for further tokens,
    which has them.

    Args:
        folder: Made, with everything that a checkpoint has.
        has_experts: The network itself has one more layer as well, with experts.

    Returns:
        `folder`.
    """
    shutil.copytree(checkpoint_path(), folder, dirs_exist_ok=True)
    values = json.loads((checkpoint_path() / "config.json").read_text())
    layer, size = values["num_hidden_layers"], values["hidden_size"]
    values |= {
        "architectures": ["Glm4MoeForCausalLM"], "model_type": "glm4_moe", "partial_rotary_factor": 1.0,
        "use_qk_norm": False, "first_k_dense_replace": layer, "num_nextn_predict_layers": 1, "n_routed_experts": 4,
        "n_shared_experts": 1, "num_experts_per_tok": 2, "moe_intermediate_size": size, "norm_topk_prob": True,
        "n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.0,
    }  # fmt: skip
    tensors, generator = load_file(checkpoint_path() / "model.safetensors"), torch.Generator().manual_seed(0)
    if has_experts:
        _add_sparse_layer(tensors, layer, size, generator)
        tensors[f"model.layers.{layer}.self_attn.o_proj.weight"] *= 0.1  # something of what the layers before made
        layer += 1
        values["num_hidden_layers"] = layer
    (folder / "config.json").write_text(json.dumps(values))
    prefix = f"model.layers.{layer}"
    _add_sparse_layer(tensors, layer, size, generator)
    # Mostly the hidden state, and something of the token.
    tensors[f"{prefix}.eh_proj.weight"] = torch.cat((torch.eye(size) * 0.3, torch.eye(size)), dim=1).bfloat16()
    for name in ("enorm", "hnorm"):
        tensors[f"{prefix}.{name}.weight"] = torch.ones(size).bfloat16()
    tensors[f"{prefix}.shared_head.norm.weight"] = tensors["model.norm.weight"].clone()
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


def _add_sparse_layer(tensors: dict[str, torch.Tensor], layer: int, size: int, generator: torch.Generator) -> None:
    """A layer with random experts behind the others; its attention is that of the layer before."""
    prefix = f"model.layers.{layer}"
    for name in [name for name in tensors if name.startswith(f"model.layers.{layer - 1}.") and ".mlp." not in name]:
        tensors[name.replace(f"layers.{layer - 1}.", f"layers.{layer}.")] = tensors[name].clone()
    for part in (*(f"experts.{i}" for i in range(4)), "shared_experts"):
        for name in ("gate_proj", "up_proj", "down_proj"):
            random = torch.randn(size, size, generator=generator)
            tensors[f"{prefix}.mlp.{part}.{name}.weight"] = random.mul(0.02).bfloat16()
    tensors[f"{prefix}.mlp.gate.weight"] = torch.randn(4, size, generator=generator).bfloat16()
    tensors[f"{prefix}.mlp.gate.e_score_correction_bias"] = torch.zeros(4)


def write_adapter_of_layers(folder: Path, adapter: Path) -> Path:
    """An adapter of the demo model for a network that has more layers, which it leaves as they are.

    Args:
        folder: Made.
        adapter: The adapter.

    Returns:
        `folder`.
    """
    shutil.copytree(adapter, folder)
    values = json.loads((folder / "adapter_config.json").read_text())
    num_layers = json.loads((checkpoint_path() / "config.json").read_text())["num_hidden_layers"]
    values["layers_to_transform"] = list(range(num_layers))
    (folder / "adapter_config.json").write_text(json.dumps(values))
    return folder

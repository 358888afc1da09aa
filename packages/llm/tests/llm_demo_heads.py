"""The demo model with what it has no companions for: other drafters, and a layer for further tokens. Random, but near
enough to what it computes that some drafts are right."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from quire_demo_model import checkpoint_path

__all__ = [
    "write_adapter_of_layers",
    "write_block_drafter",
    "write_medusa_heads",
    "write_mlp_speculator",
    "write_with_mtp_layer",
]


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


def write_mlp_speculator(folder: Path, num_heads: int = 3) -> Path:
    """A random MLP speculator for the demo model, whose LM heads are the embedding.

    Args:
        folder: Made.

    Returns:
        `folder`.
    """
    folder.mkdir(exist_ok=True)
    embedding = load_file(checkpoint_path() / "model.safetensors")["model.embed_tokens.weight"]
    (vocab, size), generator = embedding.shape, torch.Generator().manual_seed(0)
    tensors = {}
    for i in range(num_heads):
        own = {"emb": embedding, "head": embedding, "proj": torch.randn(size, size, generator=generator) * size**-0.5}
        own |= {"ln": torch.ones(size)}
        tensors |= {f"speculator.{part}.{i}.weight": tensor.bfloat16().clone() for part, tensor in own.items()}
        tensors[f"speculator.ln.{i}.bias"] = torch.zeros(size).bfloat16()
    save_file(tensors, folder / "model.safetensors")
    fields = {
        "architectures": ["MLPSpeculatorPreTrainedModel"], "model_type": "mlp_speculator", "vocab_size": vocab,
        "emb_dim": size, "inner_dim": size, "n_predict": num_heads, "scale_input": True,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(fields))
    return folder


def write_block_drafter(folder: Path, kind: str) -> Path:
    """A random drafter for the demo model that says all of a draft in one pass.

    Args:
        folder: Made.
        kind: "dflash" or "peagle".

    Returns:
        `folder`.
    """
    folder.mkdir(exist_ok=True)
    target = json.loads((checkpoint_path() / "config.json").read_text())
    size, head_dim = target["hidden_size"], target["hidden_size"] // target["num_attention_heads"]
    width, kv_width = size, target["num_key_value_heads"] * head_dim
    is_dflash, inner, generator = kind == "dflash", 64, torch.Generator().manual_seed(0)
    fields = {**target, "num_hidden_layers": 1, "intermediate_size": inner, "head_dim": head_dim}
    if is_dflash:
        fields |= {
            "architectures": ["DFlashDraftModel"], "block_size": 4,
            "dflash_config": {"mask_token_id": 3, "target_layer_ids": [0, 2]},
        }  # fmt: skip
    else:
        fields |= {"eagle_aux_hidden_state_layer_ids": [1, 3], "ptd_token_id": 3}
    (folder / "config.json").write_text(json.dumps(fields))

    def matrix(*shape: int) -> torch.Tensor:
        return (torch.randn(*shape, generator=generator) * shape[-1] ** -0.5).bfloat16()

    inputs = size if is_dflash else 2 * size
    shapes = {"q": (width, inputs), "k": (kv_width, inputs), "v": (kv_width, inputs), "o": (size, width)}
    tensors = {f"layers.0.self_attn.{name}_proj.weight": matrix(*shape) for name, shape in shapes.items()}
    shapes = {"gate": (inner, size), "up": (inner, size), "down": (size, inner)}
    tensors |= {f"layers.0.mlp.{name}_proj.weight": matrix(*shape) for name, shape in shapes.items()}
    norms = {"layers.0.input_layernorm": size, "layers.0.post_attention_layernorm": size, "norm": size}
    if is_dflash:
        norms |= {"hidden_norm": size, "layers.0.self_attn.q_norm": head_dim, "layers.0.self_attn.k_norm": head_dim}
    else:
        norms["layers.0.hidden_norm"] = size
        tensors["mask_hidden"] = matrix(1, 2 * size)
    tensors |= {f"{name}.weight": torch.ones(length).bfloat16() for name, length in norms.items()}
    save_file({**tensors, "fc.weight": matrix(size, 2 * size)}, folder / "model.safetensors")
    return folder

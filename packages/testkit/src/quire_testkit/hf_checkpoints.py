"""Tiny random checkpoints of real Hugging Face classes, for parity tests. Needs transformers, imported when used.

    model = tiny_hf_checkpoint(tmp_path, "qwen3", tie_word_embeddings=True, rope="yarn")

returns the transformers model in float32, the oracle, after writing config.json and safetensors into the folder.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

__all__ = ["FAMILIES", "ROPE_VARIATIONS", "tiny_hf_checkpoint"]

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")

ROPE_VARIATIONS: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 2.0},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
}

_CLASSES = {
    "llama": ("LlamaConfig", "LlamaForCausalLM"),
    "mistral": ("MistralConfig", "MistralForCausalLM"),
    "qwen2": ("Qwen2Config", "Qwen2ForCausalLM"),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM"),
}

_TINY: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": 64,
    "intermediate_size": 112,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def tiny_hf_checkpoint(
    folder: str | Path,
    family: str,
    *,
    seed: int = 0,
    rope: str | dict[str, Any] = "default",
    rope_theta: float = 10000.0,
    dtype: str = "float32",
    max_shard_size: str = "5GB",
    **variations: Any,
) -> Any:
    """Write a random checkpoint of a family, with biases and norm weights that are not the trivial ones.

    Args:
        folder: Where config.json and the safetensors files go.
        family: One of `FAMILIES`.
        rope: A key of `ROPE_VARIATIONS`, or the parameters themselves.
        dtype: Of the stored weights.
        max_shard_size: As in transformers; small values give a sharded checkpoint with an index.
        **variations: Fields of the transformers configuration, for example `tie_word_embeddings=True`,
            `num_key_value_heads=4`, `attention_bias=True`, `sliding_window=24`.

    Returns:
        The transformers model in evaluation mode, in the stored dtype.
    """
    import torch
    import transformers

    if family not in _CLASSES:
        raise ValueError(f"there is no family {family!r}; choose one of {', '.join(FAMILIES)}")
    config_name, model_name = _CLASSES[family]
    rope_parameters = dict(ROPE_VARIATIONS[rope] if isinstance(rope, str) else rope)
    fields = {**_TINY, **variations, "rope_parameters": {"rope_theta": rope_theta, **rope_parameters}}
    if family == "mistral":
        fields.setdefault("sliding_window", None)
    config = getattr(transformers, config_name)(**fields)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = getattr(transformers, model_name)(config)
        for name, parameter in model.named_parameters():
            # Biases start as zeros and norm weights as ones, which would hide that they are not applied.
            if name.endswith("bias") or "norm" in name:
                parameter.data.add_(torch.randn_like(parameter) * 0.2)
        # Parameters only: casting the whole model would round its rotary frequencies too.
        for parameter in model.parameters():
            parameter.data = parameter.data.to(getattr(torch, dtype))
    model = model.eval()
    model.save_pretrained(folder, max_shard_size=max_shard_size)
    return model

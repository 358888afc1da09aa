"""Random checkpoints of families with recurrent layers: their config.json and weights, from the size of a decoder.

Knows Mamba-2 and Qwen3-Next (without experts); `checkpoints.py` writes the files.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

__all__ = ["RECURRENT_FAMILIES", "recurrent_fields", "recurrent_shapes"]

Shapes = Iterator[tuple[str, tuple[int, ...]]]

RECURRENT_FAMILIES: dict[str, dict[str, Any]] = {
    "mamba2": {"model_type": "mamba2", "architectures": ["Mamba2ForCausalLM"]},
}
"""As `checkpoints.FAMILIES`; the rest of a configuration follows from the size."""


def recurrent_fields(like: str, size: dict[str, Any]) -> dict[str, Any]:
    """Fields of config.json beyond those that every family has."""
    hidden = size["hidden_size"]
    head_dim = min(64, hidden // 2)
    return {
        "expand": 2,
        "head_dim": head_dim,
        "num_heads": 2 * hidden // head_dim,
        "state_size": min(128, hidden),
        "n_groups": 1,
        "conv_kernel": 4,
        "use_conv_bias": True,
        "use_bias": False,
    }


def recurrent_shapes(config: dict[str, Any]) -> Shapes:
    """Name and shape of every weight, in the order they are stored."""
    hidden, heads = config["hidden_size"], config["num_heads"]
    inner = heads * config["head_dim"]
    conv = inner + 2 * config["n_groups"] * config["state_size"]
    yield "backbone.embeddings.weight", (config["vocab_size"], hidden)
    for layer in range(config["num_hidden_layers"]):
        at = f"backbone.layers.{layer}."
        yield f"{at}norm.weight", (hidden,)
        yield f"{at}mixer.in_proj.weight", (inner + conv + heads, hidden)
        yield f"{at}mixer.conv1d.weight", (conv, 1, config["conv_kernel"])
        yield f"{at}mixer.conv1d.bias", (conv,)
        for name in ("A_log", "D", "dt_bias"):
            yield f"{at}mixer.{name}", (heads,)
        yield f"{at}mixer.norm.weight", (inner,)
        yield f"{at}mixer.out_proj.weight", (hidden, inner)
    yield "backbone.norm_f.weight", (hidden,)
    if not config["tie_word_embeddings"]:
        yield "lm_head.weight", (config["vocab_size"], hidden)

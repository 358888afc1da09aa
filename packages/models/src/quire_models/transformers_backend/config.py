"""What is read of the config.json of an architecture that Quire has no network of its own for. Free of torch.

Only what planners and the engine ask: Transformers reads the rest. When the network is built it is checked that both
have understood the same.
"""

from __future__ import annotations

import json
from math import prod
from pathlib import Path

from quire_models.config import ModelConfig
from quire_models.config_fields import decoder_fields, layer_windows
from quire_models.fields import Fields

__all__ = ["read_config", "stored_parameters"]

UNSUPPORTED = {
    "index_topk": "sparse attention",
    "ssm_cfg": "recurrent layers",
    "mamba_d_state": "recurrent layers",
    "linear_conv_kernel_dim": "recurrent layers",
    "is_encoder_decoder": "an encoder",
    "text_config": "several modalities",
    "auto_map": "code of its own",
    "attention_chunk_size": "chunked attention",
}
"""Field of config.json -> what it says that the network has, which this backend does not run."""


def read_config(config: Fields) -> ModelConfig:
    """Sizes, heads and windows under the names that most configurations use."""
    for name in UNSUPPORTED:
        config.fixed(name, False)
    named = config.named(hidden_act="-", intermediate_size="-", rms_norm_eps="-")
    values = decoder_fields(named, rotary=False, inner_factor=4)
    if config.flag("use_sliding_window", default=True):
        values["sliding_windows"] = layer_windows(config, values["num_layers"])
    if config.integer("kv_lora_rank", default=0):
        # Latent attention: Transformers hands out the keys and values that it makes of the latents, for each head.
        values["num_kv_heads"] = values["num_heads"]
        values["head_dim"] = config.integer("qk_nope_head_dim") + config.integer("qk_rope_head_dim")
    return ModelConfig(**values, is_native=False)


def stored_parameters(folder: Path) -> int | None:
    """Weights in the safetensors files of a checkpoint, from their headers; None when there are none."""
    files = sorted(folder.glob("*.safetensors"))
    total = 0
    for file in files:
        with file.open("rb") as stream:
            header = json.loads(stream.read(int.from_bytes(stream.read(8), "little")))
        total += sum(prod(entry["shape"]) for name, entry in header.items() if name != "__metadata__")
    return total if files else None

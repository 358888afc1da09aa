"""Step-1 (StepFun 2024): Llama with biases by the square root of the distance in the place of rotations."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from quire_interfaces import Fields
from quire_models.decoder_sizes import decoder_sizes
from quire_models.mixer_spec import SelfAttentionSpec
from quire_models.spec import NetworkSpec, recast

__all__ = ["RootAlibiSpec", "spec"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RootAlibiSpec(SelfAttentionSpec):
    """Attention whose scores fall with the root of the distance."""

    max_distance: int
    """The largest distance between two tokens."""
    built_by: ClassVar[str] = "quire_models.families.step1_layers:RootAlibiAttention"
    score_copies: ClassVar[int] = 4


def spec(config: Fields) -> NetworkSpec:
    """`num_attention_groups` are the key-value heads."""
    named = config.with_default("num_key_value_heads", config.get("num_attention_groups"))
    named = named.with_default("max_position_embeddings", config.get("max_seq_len"))
    sizes = decoder_sizes(named, rotary=False, eps=1e-5)
    attention = recast(RootAlibiSpec, sizes.attention(), max_distance=sizes.max_model_len - 1)
    return sizes.network(sizes.pre_norm(layer, attention) for layer in sizes.layers)

"""What networks with recurrent layers say of themselves: which of their layers keep what. Free of torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from quire_interfaces import Fields, FullAttentionSpec, KVCacheSpec, MambaSpec, StateTensor
from quire_models.config import ModelConfig
from quire_models.config_fields import hidden_act, stored_dtype
from quire_models.mixer_shapes import MixerShape, WeightCount
from quire_models.registry import ARCHITECTURES, architecture_of
from quire_models.rope_config import RopeConfig

__all__ = [
    "HybridConfig",
    "LayerCache",
    "RecurrentConfig",
    "attention_free_fields",
    "attention_weights",
    "gated_mlp_weights",
    "hybrid_fields",
]

CONTEXT_TOKENS = 32768
"""Context of a network whose config.json names none because its memory does not grow with it."""


class LayerCache(NamedTuple):
    """What one layer, or one part of a layer, keeps of the tokens before."""

    name: str
    states: tuple[StateTensor, ...] = ()
    """None for attention: then it keeps keys and values."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecurrentConfig(ModelConfig):
    """A network with recurrent layers, and perhaps attention in others. Without attention it has no heads (0)."""

    caches: tuple[LayerCache, ...]
    """In the order in which the network's parts count them."""
    weights: Mapping[str, WeightCount]
    """Part of the network -> its weights; embedding and LM head are not listed."""
    mixer_width: int
    """Numbers that a recurrent layer keeps per token while it runs, those in float32 counted twice."""

    @property
    def inner_width(self) -> int:
        """See `ModelConfig.inner_width`."""
        return max(3 * self.intermediate_size, self.mixer_width)

    def kv_cache_specs(self, block_size: int, dtype: str) -> dict[str, KVCacheSpec]:
        """See `ModelConfig.kv_cache_specs`. States are kept in float32 whatever keys and values are."""
        attention = FullAttentionSpec(
            block_size=block_size, num_kv_heads=self.num_kv_heads, head_dim=self.head_dim, dtype=dtype
        )
        return {
            cache.name: MambaSpec(block_size=block_size, states=cache.states) if cache.states else attention
            for cache in self.caches
        }

    @property
    def state_inputs(self) -> int:
        """Numbers of a token that all ops with states are given, an upper bound: a convolution's channels; what its
        other state is written and read with, at most as many again and two for each of its rows."""
        return sum(_inputs(cache.states) for cache in self.caches)

    def cache_index(self, name: str) -> int:
        """Which cache of a batch belongs to the part of this name."""
        return [cache.name for cache in self.caches].index(name)


def _inputs(states: tuple[StateTensor, ...]) -> int:
    inputs = 0
    for state in states:
        channels = state.shape[-1]
        if len(state.shape) == 2 and state.name != "ssm":
            inputs += 2 * channels if state.name == "wkv" else channels
        elif state.name == "kv":  # lightning attention has no convolution before it
            inputs += (3 * channels + 1) * state.shape[0]
        elif len(state.shape) == 2:  # Mamba: channels and time steps, and what writes and reads the state
            inputs += 2 * (state.shape[0] + channels)
        else:
            inputs += inputs + 2 * state.shape[0]
    return inputs


def attention_free_fields(config: Fields, *, tied: bool) -> dict[str, Any]:
    """Fields of `ModelConfig` for a network without attention and feed-forward networks.

    Args:
        tied: Whether embedding and LM head share weights when config.json does not say.
    """
    architecture = architecture_of(config)
    layers = config.integer("num_hidden_layers", minimum=1)
    return {
        "architecture": architecture,
        "model_type": ARCHITECTURES[architecture].model_type,
        "vocab_size": config.integer("vocab_size", minimum=1),
        "hidden_size": config.integer("hidden_size", minimum=1),
        "intermediate_size": 0,
        "num_layers": layers,
        "num_heads": 0,
        "num_kv_heads": 0,
        "head_dim": 0,
        "rms_norm_eps": config.number("layer_norm_epsilon", default=1e-5, minimum=0.0),
        "hidden_act": hidden_act(config, acts={"silu"}),
        "rope": RopeConfig(),
        "qkv_bias": False,
        "attention_out_bias": False,
        "mlp_bias": False,
        "qk_norm": False,
        "tie_word_embeddings": config.flag("tie_word_embeddings", default=tied),
        "sliding_windows": (None,) * layers,
        "max_model_len": config.integer("max_position_embeddings", default=CONTEXT_TOKENS, minimum=1),
        "dtype": stored_dtype(config),
        "bos_token_id": next(iter(config.token_ids("bos_token_id")), None),
        "eos_token_ids": config.token_ids("eos_token_id"),
    }


def attention_weights(config: Mapping[str, int], count: int, *, bias: int = 0) -> WeightCount:
    """Of `count` attention layers.

    Args:
        config: The fields of a `ModelConfig`.
        bias: Numbers in the biases of one layer.
    """
    query, kv = config["num_heads"] * config["head_dim"], config["num_kv_heads"] * config["head_dim"]
    hidden = config["hidden_size"]
    return WeightCount(((query, hidden, count), (kv, hidden, 2 * count), (hidden, query, count)), count * bias)


def gated_mlp_weights(hidden: int, inner: int, count: int, *, bias: bool = False) -> WeightCount:
    """Of `count` gated feed-forward networks."""
    return WeightCount(((inner, hidden, 2 * count), (hidden, inner, count)), count * bias * (2 * inner + hidden))


@dataclass(frozen=True, slots=True, kw_only=True)
class HybridConfig(RecurrentConfig):
    """A recurrent mixer in most layers, attention in the others, and a feed-forward network behind each."""

    mixer: Any
    """A `MixerShape`."""
    attention_layers: tuple[bool, ...]
    """Per layer: it attends."""


def hybrid_fields(
    values: dict[str, Any], mixer: MixerShape, attends: Sequence[bool], *, kind: str = "state space"
) -> dict[str, Any]:
    """Fields of `HybridConfig` from those of a decoder whose every layer attends, without the feed-forward networks.

    Args:
        attends: Per layer, whether it attends.
        kind: What the weights of the mixers are called.
    """
    num, layers = sum(attends), values["num_layers"]
    query, kv = (values[heads] * values["head_dim"] for heads in ("num_heads", "num_kv_heads"))
    bias = values["qkv_bias"] * (query + 2 * kv) + values["attention_out_bias"] * values["hidden_size"]
    bias += values["qk_norm"] * 2 * values["head_dim"]
    return values | {
        "mixer": mixer,
        "mixer_width": mixer.width,
        "attention_layers": tuple(attends),
        "caches": tuple(
            LayerCache(f"model.layers.{layer}", () if attends[layer] else mixer.states) for layer in range(layers)
        ),
        "weights": {
            "attention": attention_weights(values, num, bias=bias),
            kind: mixer.weights(layers - num),
            "norms": WeightCount(others=(2 * layers + 1) * values["hidden_size"]),
        },
    }

"""What networks with recurrent layers say of themselves: which of their layers keep what. Free of torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from quire_interfaces import CheckpointError, FullAttentionSpec, KVCacheSpec, MambaSpec, StateTensor
from quire_models.config import ModelConfig
from quire_models.config_fields import hidden_act, stored_dtype
from quire_models.fields import Fields
from quire_models.registry import ARCHITECTURES, architecture_of
from quire_models.rope_config import RopeConfig

__all__ = [
    "LayerCache",
    "Mamba2Shape",
    "RecurrentConfig",
    "WeightCount",
    "attention_free_fields",
    "attention_weights",
    "gated_mlp_weights",
    "time_step_limit",
]

CONTEXT_TOKENS = 32768
"""Context of a network whose config.json names none because its memory does not grow with it."""


class LayerCache(NamedTuple):
    """What one layer, or one part of a layer, keeps of the tokens before."""

    name: str
    states: tuple[StateTensor, ...] = ()
    """None for attention: then it keeps keys and values."""


class WeightCount(NamedTuple):
    """Weights of a part of the network."""

    matrices: tuple[tuple[int, int, int], ...] = ()
    """(outputs, inputs, how many) of linear layers, which a linear method may keep in another form."""
    others: int = 0
    """Numbers that are kept in the compute dtype."""
    wide: int = 0
    """Numbers that are kept in float32."""


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

    def cache_index(self, name: str) -> int:
        """Which cache of a batch belongs to the part of this name."""
        return [cache.name for cache in self.caches].index(name)


@dataclass(frozen=True, slots=True, kw_only=True)
class Mamba2Shape:
    """A Mamba-2 mixer (Dao & Gu 2024, arXiv:2405.21060)."""

    hidden_size: int
    num_heads: int
    head_dim: int
    state_size: int
    num_groups: int
    conv_kernel: int
    conv_bias: bool
    proj_bias: bool
    eps: float
    """Of the norm behind the scan."""
    normed: bool = True
    """Behind the scan there is a norm beside the gate, over the channels of each group for themselves."""
    norm_before_gate: bool = False
    dt_limit: tuple[float, float] = (0.0, float("inf"))
    """Bounds of the time steps."""

    @property
    def inner_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def conv_size(self) -> int:
        """Channels of the convolution: what goes into the state, and what writes and reads it."""
        return self.inner_size + 2 * self.num_groups * self.state_size

    @property
    def width(self) -> int:
        """See `RecurrentConfig.mixer_width`: projected, convolved, and the scan's copies."""
        inputs = 2 * (self.inner_size + self.conv_size) + self.num_heads
        return inputs + 2 * (4 * self.inner_size + 2 * self.num_heads * self.state_size)

    @property
    def states(self) -> tuple[StateTensor, ...]:
        return (
            StateTensor("conv", (self.conv_kernel - 1, self.conv_size), "float32"),
            StateTensor("ssm", (self.num_heads, self.head_dim, self.state_size), "float32"),
        )

    def check(self, source: str) -> None:
        """Raises CheckpointError when groups do not divide heads; `source` names the file."""
        if self.num_heads % self.num_groups:
            raise CheckpointError(
                f"{source}: {self.num_heads} Mamba heads cannot be shared out to {self.num_groups} groups"
            )

    def weights(self, count: int) -> WeightCount:
        """Of `count` mixers."""
        inputs = self.inner_size + self.conv_size + self.num_heads
        others = self.conv_size * (self.conv_kernel + self.conv_bias) + self.normed * self.inner_size
        others += self.proj_bias * (inputs + self.hidden_size)
        return WeightCount(
            ((inputs, self.hidden_size, count), (self.hidden_size, self.inner_size, count)),
            count * others,
            count * 3 * self.num_heads,
        )


def time_step_limit(config: Fields) -> tuple[float, float]:
    """`time_step_limit` of a config.json; an infinite bound may be written as {"__float__": "Infinity"}."""
    given = config.get("time_step_limit")
    if given is None:
        return (0.0, float("inf"))
    try:
        low, high = (float(bound["__float__"] if isinstance(bound, dict) else bound) for bound in given)
    except (TypeError, ValueError, KeyError):
        low = high = float("nan")
    if not low <= high:
        raise CheckpointError(
            f"{config.source}: time_step_limit must be two numbers, the smaller one first, is {given!r}"
        )
    return (low, high)


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

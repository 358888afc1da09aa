"""RWKV-4's config.json."""

from __future__ import annotations

from dataclasses import dataclass

from quire_interfaces import Fields, StateTensor
from quire_models.mixer_shapes import WeightCount
from quire_models.recurrent_config import LayerCache, RecurrentConfig, attention_free_fields

__all__ = ["RwkvConfig", "read_config"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RwkvConfig(RecurrentConfig):
    """Layers of time mixing and channel mixing. Norms are layer norms."""

    attention_size: int
    """Channels of the time mixing."""
    rescale_every: int
    """The stream is halved behind as many layers (0: never), as Transformers does at inference: seen in the eps of
    norms alone."""

    def eps_factor(self, layer: int) -> float:
        """Of the eps of a layer's norms, for a stream that is not halved: variances are as many times as large."""
        return float(4.0 ** (layer // self.rescale_every if self.rescale_every else 0))


def read_config(config: Fields) -> RwkvConfig:
    """`context_length` bounds requests, although the state does not grow with them."""
    values = attention_free_fields(config.named(max_position_embeddings="context_length"), tied=False)
    hidden, layers = values["hidden_size"], values["num_layers"]
    size = config.integer("attention_hidden_size", default=hidden, minimum=1)
    inner = config.integer("intermediate_size", default=4 * hidden, minimum=1)
    states = (
        StateTensor("time mixing", (1, hidden), "float32"),
        StateTensor("wkv", (3, size), "float32"),
        StateTensor("channel mixing", (1, hidden), "float32"),
    )
    return RwkvConfig(
        **values | {"intermediate_size": inner, "norm_bias": True},
        attention_size=size,
        rescale_every=max(0, config.integer("rescale_every", default=6)),
        mixer_width=4 * hidden + 2 * 5 * size,
        caches=tuple(LayerCache(f"rwkv.blocks.{layer}", states) for layer in range(layers)),
        weights={
            "time mixing": WeightCount(
                ((size, hidden, 3 * layers), (hidden, size, layers)), layers * 3 * hidden, layers * 2 * size
            ),
            "channel mixing": WeightCount(
                ((inner, hidden, layers), (hidden, hidden, layers), (hidden, inner, layers)), layers * 2 * hidden
            ),
            "norms": WeightCount(others=(2 * layers + 2) * 2 * hidden),
        },
    )

"""What recurrent classes of Transformers keep of a sequence, from their config.json. Free of torch.

Shapes are those of the class's own cache layers (`LinearAttentionLayer`): the last inputs of a convolution, and a
state. When the network is built it is checked that it keeps just these.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple

from quire_interfaces import Fields, StateTensor
from quire_models.config_fields import layer_kinds
from quire_models.mixer_spec import RecurrentSpec
from quire_models.spec import MixerSpec, NetworkSpec, Weight, recast
from quire_models.transformers_backend.config import UNSUPPORTED, FallbackSpec, fallback_spec

__all__ = ["STATES", "RecurrentFallbackSpec", "StatesSpec", "recurrent_spec"]

KINDS = {
    "full_attention": (True, False),
    "attention": (True, False),
    "sliding_attention": (True, False),
    "linear_attention": (False, True),
    "conv": (False, True),
    "hybrid": (True, True),
    "hybrid_sliding": (True, True),
}
"""Kind of a layer, as `layer_types` names it -> whether it attends, and whether it keeps states."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StatesSpec(RecurrentSpec):
    """What a layer of a class of Transformers keeps of a sequence, whatever its length."""

    name: str = "states"
    tensors: tuple[StateTensor, ...]

    @property
    def width(self) -> int:
        """See `MixerSpec.width`: inputs and outputs of a convolution, in float32."""
        return 4 * max(tensor.shape[0] for tensor in self.tensors)

    @property
    def states(self) -> tuple[StateTensor, ...]:
        """See `MixerSpec.states`."""
        return self.tensors

    def weights(self) -> Iterator[Weight]:
        """None that are known: weights are counted in the files."""
        return iter(())


@dataclass(frozen=True, slots=True, kw_only=True)
class RecurrentFallbackSpec(FallbackSpec):
    """Of a network with recurrent layers that Transformers runs."""

    token_by_token: bool = False
    """Its class continues a state by one token alone; several at once begin a sequence."""
    built_by: ClassVar[str] = "quire_models.transformers_backend.recurrent:RecurrentLM"


class Kept(NamedTuple):
    """What recurrent layers of a class keep."""

    states: Callable[[Fields], dict[str, tuple[int, ...]]]
    """config.json -> name and shape of each tensor of a layer, in the order of its cache: "conv" and "state"."""
    kinds: Callable[[Fields, int], list[str]]
    """config.json and a number of layers -> kind of each layer where config.json has no `layer_types`."""
    sizes: Callable[[Fields], Fields] = lambda config: config
    """config.json under the names that the backend reads."""
    token_by_token: bool = False


def _lfm3(config: Fields) -> dict[str, tuple[int, ...]]:
    return {"conv": (config.integer("hidden_size"), config.integer("conv_L_cache", default=7))}


def _lfm3_kinds(config: Fields, layers: int) -> list[str]:
    return [
        "full_attention" if i % 4 == 2 else "sliding_attention" if i % 4 == 0 and i else "conv" for i in range(layers)
    ]


def _zamba(config: Fields) -> dict[str, tuple[int, ...]]:
    inner = config.integer("mamba_expand", default=2) * config.integer("hidden_size")
    heads = config.integer("n_mamba_heads", default=2)
    return {
        "conv": (inner, config.integer("mamba_d_conv", default=4)),
        "state": (heads, inner // heads, config.integer("mamba_d_state", default=16)),
    }


def _zamba_kinds(config: Fields, layers: int) -> list[str]:
    period, offset = config.integer("attn_layer_period", default=6), config.integer("attn_layer_offset", default=4)
    rest = ["hybrid" if i % period == offset else "linear_attention" for i in range(layers - 3)]
    return ["linear_attention", "linear_attention", "hybrid", *rest]


def _zamba_sizes(config: Fields) -> Fields:
    width = 2 * config.integer("hidden_size") // config.integer("num_attention_heads")
    return config.with_default("attention_head_dim", width)


def _zaya(config: Fields) -> dict[str, tuple[int, ...]]:
    heads, head_dim = config.integer("num_key_value_heads"), config.integer("head_dim", default=128)
    kernel = config.integer("cca_time0", default=2) + config.integer("cca_time1", default=2) - 2
    return {
        "conv": ((heads + config.integer("num_attention_heads")) * head_dim, kernel),
        "state": (heads * head_dim // 2,),
    }


STATES: dict[str, Kept] = {
    "lfm3": Kept(_lfm3, _lfm3_kinds, lambda config: config.with_default("head_dim", 128)),
    "zamba": Kept(_zamba, _zamba_kinds, _zamba_sizes, token_by_token=True),
    "zaya": Kept(
        _zaya, lambda config, layers: ["hybrid"] * layers, lambda config: config.with_default("head_dim", 128)
    ),
}
"""model_type -> what layers of the class keep."""


def recurrent_spec(config: Fields) -> NetworkSpec:
    """Sizes, heads, windows and states of a recurrent class.

    Raises:
        CheckpointError: A field that is missing or wrong.
    """
    kept = STATES[config.text("model_type")]
    layers = config.integer("num_hidden_layers", minimum=1)
    kinds = _kinds(config, kept, layers)
    windows = ["sliding_attention" if "sliding" in kind else "full_attention" for kind in kinds]
    hidden = dict.fromkeys(UNSUPPORTED, "-")
    named = kept.sizes(config).named(**hidden, layer_types="-layer_types").with_default("layer_types", windows)
    network = fallback_spec(named)
    tensors = tuple(StateTensor(name, shape, "float32") for name, shape in kept.states(config).items())
    states = StatesSpec(tensors=tensors)
    mixed = []
    for layer, kind in zip(network.layers, kinds, strict=True):
        attends, keeps = KINDS[kind]
        mixers: tuple[MixerSpec, ...] = (*(layer.mixers if attends else ()), *((states,) if keeps else ()))
        mixed.append(replace(layer, mixers=mixers))
    network = replace(network, layers=tuple(mixed), caches_by_mixer=True)
    return recast(RecurrentFallbackSpec, network, token_by_token=kept.token_by_token)


def _kinds(config: Fields, kept: Kept, layers: int) -> list[str]:
    name = "layer_types" if config.get("layer_types") is not None else "layers_block_type"
    if config.get(name) is None:
        return kept.kinds(config, layers)
    known: Any = {kind: kind for kind in KINDS}
    return list(layer_kinds(config, name, layers, {**known, "mamba": "linear_attention"}, ()))

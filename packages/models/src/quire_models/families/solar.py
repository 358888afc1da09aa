"""Solar Pro (Upstage 2024): Llama whose stream is mixed with what it was some layers before (block skips)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

from quire_interfaces import CheckpointError, Fields
from quire_models.config_fields import layer_windows
from quire_models.decoder_sizes import decoder_sizes
from quire_models.spec import NetworkSpec

__all__ = ["SkippingSpec", "spec"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SkippingSpec(NetworkSpec):
    """A network whose stream, before some layers, is mixed with what it was before others."""

    skips: tuple[tuple[tuple[int, ...], tuple[int, ...]], ...] = field(default=())
    """Pairs: layers before which the stream is kept, and those before which it is mixed with what was kept last."""
    share: float
    """Of what was kept, in the mixture."""
    built_by: ClassVar[str] = "quire_models.families.solar_layers:SolarForCausalLM"


def spec(config: Fields) -> NetworkSpec:
    """`bskcn_1` and `bskcn_2` are the layers that keep, `bskcn_3` and `bskcn_4` those that mix; the share is the second
    number of `bskcn_tv`, the first one being that of training."""
    sizes = decoder_sizes(config)
    attention_bias, mlp_bias = (config.flag(f"{name}_bias", default=False) for name in ("attention", "mlp"))
    shares = config.get("bskcn_tv")
    if not isinstance(shares, list) or len(shares) != 2 or not all(isinstance(each, int | float) for each in shares):
        raise CheckpointError(f"{config.source}: bskcn_tv must have two numbers, is {shares!r}")
    kept_1, kept_2, mixed_1, mixed_2 = (_layers(config, f"bskcn_{number}", sizes.num_layers) for number in range(1, 5))
    for kept, mixed in ((kept_1, mixed_1), (kept_2, mixed_2)):
        if mixed and (not kept or min(mixed) < min(kept)):
            raise CheckpointError(f"{config.source}: bskcn mixes before layer {min(mixed)} what no layer before kept")
    return sizes.network(
        (
            sizes.pre_norm(
                layer,
                sizes.attention(bias=attention_bias, sliding_window=window),
                sizes.gated_mlp(bias=mlp_bias),
            )
            for layer, window in enumerate(layer_windows(config, sizes.num_layers))
        ),
        kind=SkippingSpec,
        skips=((kept_1, mixed_1), (kept_2, mixed_2)),
        share=float(shares[1]),
    )


def _layers(config: Fields, name: str, num_layers: int) -> tuple[int, ...]:
    listed: Any = config.get(name) or []
    if not isinstance(listed, list) or not all(type(layer) is int and 0 <= layer < num_layers for layer in listed):
        raise CheckpointError(f"{config.source}: {name} must list some of {num_layers} layers, is {listed!r}")
    return tuple(listed)

"""A network of another package: Llama, whose feed-forward networks are damped by a factor of config.json.

Free of torch, because planners and the server's process read it, too; the layer is in `layers.py`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from quire_interfaces import Fields
from quire_models.decoder_sizes import decoder_sizes
from quire_models.feed_forward_spec import GatedMLPSpec
from quire_models.spec import NetworkSpec

__all__ = ["DampedMLPSpec", "spec"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DampedMLPSpec(GatedMLPSpec):
    """A gated feed-forward network whose output is multiplied by `damping`."""

    damping: float
    built_by: ClassVar[str] = "quire_network.layers:DampedMLP"


def spec(config: Fields) -> NetworkSpec:
    """The network of a config.json.

    Raises:
        CheckpointError: A field that is missing or wrong.
    """
    sizes = decoder_sizes(config)
    mlp = sizes.gated_mlp()
    damped = DampedMLPSpec(
        name=mlp.name,
        hidden_size=mlp.hidden_size,
        intermediate_size=mlp.intermediate_size,
        act=mlp.act,
        damping=config.number("damping"),
    )
    return sizes.network(sizes.pre_norm(layer, sizes.attention(), damped) for layer in sizes.layers)

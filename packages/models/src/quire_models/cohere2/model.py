"""Command R7B and Command A (Cohere 2024): sliding layers are rotated, those of full attention know no positions."""

from __future__ import annotations

from quire_models.cohere.config import CohereConfig
from quire_models.cohere.model import CohereForCausalLM, make_layer
from quire_models.layers.blocks import ParallelBlock
from quire_models.layers.scope import Scope

__all__ = ["Cohere2ForCausalLM"]


def make_cohere2_layer(config: CohereConfig, layer: int, scope: Scope) -> ParallelBlock:
    """One layer; those of full attention know no positions."""
    return make_layer(config, layer, scope, rotated=config.sliding_windows[layer] is not None)


class Cohere2ForCausalLM(CohereForCausalLM):
    """The Cohere 2 network."""

    def __init__(self, config: CohereConfig, scope: Scope) -> None:
        super().__init__(config, scope, make_cohere2_layer)

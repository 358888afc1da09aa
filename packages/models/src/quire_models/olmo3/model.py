"""OLMo 3 (OLMo Team 2025): OLMo 2 with windows in three of four layers, which are rotated without scaling."""

from __future__ import annotations

from quire_models.olmo2.model import Olmo2ForCausalLM
from quire_models.olmo3.config import Olmo3Config
from quire_models.rope_config import RopeConfig

__all__ = ["Olmo3ForCausalLM"]


class Olmo3ForCausalLM(Olmo2ForCausalLM):
    """The OLMo 3 network."""

    config: Olmo3Config

    def rope_of_layer(self, layer: int) -> RopeConfig:
        """Sliding layers have their own."""
        return self.config.rope if self.config.sliding_windows[layer] is None else self.config.local_rope

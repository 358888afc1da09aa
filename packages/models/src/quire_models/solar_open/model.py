"""Solar Open (Upstage 2025): GLM-4.5's routing in every layer, heads that are rotated whole."""

from __future__ import annotations

from quire_models.glm4_moe.model import GroupedMoELM

__all__ = ["SolarOpenForCausalLM"]


class SolarOpenForCausalLM(GroupedMoELM):
    """The Solar Open network; what is its own is in the configuration."""

"""dots.llm1 (rednote-hilab 2025): GLM-4.5's routing, normalised heads, rotated whole, windows in some layers."""

from __future__ import annotations

from quire_models.glm4_moe.model import GroupedMoELM

__all__ = ["Dots1ForCausalLM"]


class Dots1ForCausalLM(GroupedMoELM):
    """The dots.llm1 network; what is its own is in the configuration."""

"""GLM-5 (Z.ai 2026): the network of DeepSeek-V3.2, in which layers may share what an index found."""

from __future__ import annotations

from quire_models.deepseek_v32.model import DeepseekV32ForCausalLM

__all__ = ["GlmMoeDsaForCausalLM"]


class GlmMoeDsaForCausalLM(DeepseekV32ForCausalLM):
    """The GLM-5 network."""

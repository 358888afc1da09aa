"""Parity cases of architectures that run through Transformers, with Quire's attention."""

from __future__ import annotations

from quire_testkit.parity.case import LLAMA_FIELDS, ParityCase

__all__ = ["FALLBACK_CASES"]

_WINDOWS = ["sliding_attention", "full_attention", "sliding_attention"]
_MOE = {**LLAMA_FIELDS, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 48}

FALLBACK_CASES: dict[str, ParityCase] = {
    "BitNetForCausalLM": ParityCase(config="BitNetConfig"),
    "CwmForCausalLM": ParityCase(
        config="CwmConfig", fields={**LLAMA_FIELDS, "head_dim": 16, "sliding_window": 20, "layer_types": _WINDOWS}
    ),
    "Emu3ForCausalLM": ParityCase(config="Emu3TextConfig"),
    "Ernie4_5ForCausalLM": ParityCase(config="Ernie4_5Config", fields={**LLAMA_FIELDS, "head_dim": 16}),
    "GraniteSWAForCausalLM": ParityCase(config="GraniteSWAConfig"),
    "HyperCLOVAXForCausalLM": ParityCase(config="HyperCLOVAXConfig"),
    "Jais2ForCausalLM": ParityCase(config="Jais2Config"),
    "NanoChatForCausalLM": ParityCase(config="NanoChatConfig"),
    "VaultGemmaForCausalLM": ParityCase(
        config="VaultGemmaConfig", fields={**LLAMA_FIELDS, "head_dim": 16, "sliding_window": 20}
    ),
    "MellumForCausalLM": ParityCase(config="MellumConfig", fields=_MOE),
    "AfmoeForCausalLM": ParityCase(config="AfmoeConfig", fields=_MOE),
    "PhimoeForCausalLM": ParityCase(config="PhimoeConfig", fields=_MOE),
    "HunYuanMoEV1ForCausalLM": ParityCase(config="HunYuanMoEV1Config", fields={**_MOE, "head_dim": 16}),
    "ExaoneMoeForCausalLM": ParityCase(config="ExaoneMoeConfig", fields=_MOE),
    "AriaTextForCausalLM": ParityCase(config="AriaTextConfig", fields=_MOE),
    "BeamForCausalLM": ParityCase(config="BeamConfig", fields=_MOE),
    "Cohere2MoeForCausalLM": ParityCase(config="Cohere2MoeConfig", fields=_MOE),
    "FlintForCausalLM": ParityCase(config="FlintConfig", fields=_MOE),
    "GraniteMoeSWAForCausalLM": ParityCase(config="GraniteMoeSWAConfig", fields=_MOE),
    "HYV3ForCausalLM": ParityCase(config="HYV3Config", fields=_MOE),
    "Kolibri1ForCausalLM": ParityCase(config="Kolibri1Config", fields=_MOE),
    "LagunaForCausalLM": ParityCase(config="LagunaConfig", fields=_MOE),
    "MiniMaxM3VLForCausalLM": ParityCase(config="MiniMaxM3VLTextConfig", fields=_MOE),
}
"""Architecture -> its case."""

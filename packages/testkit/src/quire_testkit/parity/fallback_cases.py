"""Parity cases of architectures that run through Transformers, with Quire's attention."""

from __future__ import annotations

from quire_testkit.parity.case import LLAMA_FIELDS, ParityCase

__all__ = ["FALLBACK_CASES"]

_WINDOWS = ["sliding_attention", "full_attention", "sliding_attention"]
_MOE = {**LLAMA_FIELDS, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 48}
_PER_HEAD = {**LLAMA_FIELDS, "num_key_value_heads": 4}
_BERT = {**_PER_HEAD, "is_decoder": True}
_LATENT = {
    **_PER_HEAD,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
}
_LATENT_MOE = {
    **_LATENT,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "n_group": 2,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}

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
    "BertLMHeadModel": ParityCase(config="BertConfig", fields=_BERT),
    "ElectraForCausalLM": ParityCase(config="ElectraConfig", fields={**_BERT, "embedding_size": 32}),
    "ErnieForCausalLM": ParityCase(config="ErnieConfig", fields=_BERT),
    "RoCBertForCausalLM": ParityCase(config="RoCBertConfig", fields=_BERT),
    "CamembertForCausalLM": ParityCase(config="CamembertConfig", fields=_BERT),
    "Data2VecTextForCausalLM": ParityCase(config="Data2VecTextConfig", fields=_BERT),
    "RobertaForCausalLM": ParityCase(config="RobertaConfig", fields=_BERT),
    "RobertaPreLayerNormForCausalLM": ParityCase(config="RobertaPreLayerNormConfig", fields=_BERT),
    "XLMRobertaForCausalLM": ParityCase(config="XLMRobertaConfig", fields=_BERT),
    "XLMRobertaXLForCausalLM": ParityCase(config="XLMRobertaXLConfig", fields=_BERT),
    "XmodForCausalLM": ParityCase(
        config="XmodConfig", fields={**_BERT, "languages": ["en_XX"], "default_language": "en_XX"}
    ),
    "ModernBertDecoderForCausalLM": ParityCase(
        config="ModernBertDecoderConfig",
        fields={
            **_PER_HEAD,
            "cls_token_id": 1,
            "sep_token_id": 2,
            "local_attention": 40,
            "global_attn_every_n_layers": 2,
        },
    ),
    "AXK1ForCausalLM": ParityCase(config="AXK1Config", fields=_LATENT_MOE),
    "DeepseekV2ForCausalLM": ParityCase(
        config="DeepseekV2Config", fields={**_LATENT_MOE, "topk_method": "group_limited_greedy"}
    ),
    "DeepseekV3ForCausalLM": ParityCase(config="DeepseekV3Config", fields=_LATENT_MOE),
    "Glm4MoeLiteForCausalLM": ParityCase(config="Glm4MoeLiteConfig", fields=_LATENT_MOE),
    "Mistral4ForCausalLM": ParityCase(config="Mistral4Config", fields=_LATENT_MOE),
    "MiniCPM3ForCausalLM": ParityCase(config="MiniCPM3Config", fields=_LATENT),
}
"""Architecture -> its case."""

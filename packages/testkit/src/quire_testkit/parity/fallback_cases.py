"""Parity cases of architectures that run through Transformers, with Quire's attention."""

from __future__ import annotations

from quire_testkit.parity.case import LLAMA_FIELDS, ParityCase

__all__ = ["FALLBACK_CASES", "FALLBACK_SAMPLE"]

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
_BEHIND_ENCODER = {
    "vocab_size": 200,
    "d_model": 64,
    "encoder_layers": 4,
    "encoder_attention_heads": 2,
    "encoder_ffn_dim": 96,
    "decoder_layers": 3,
    "decoder_attention_heads": 4,
    "decoder_ffn_dim": 112,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_SCALED = {**_BEHIND_ENCODER, "scale_embedding": True}
_GEMMA = {
    **LLAMA_FIELDS,
    "num_hidden_layers": 4,
    "head_dim": 16,
    "sliding_window": 20,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}
_PER_LAYER_INPUT = {**_GEMMA, "vocab_size_per_layer_input": 200, "hidden_size_per_layer_input": 16}
_ENCODER = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2}

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
    "Glm4MoeLiteForCausalLM": ParityCase(config="Glm4MoeLiteConfig", fields=_LATENT_MOE),
    "Mistral4ForCausalLM": ParityCase(config="Mistral4Config", fields=_LATENT_MOE),
    "MiniCPM3ForCausalLM": ParityCase(config="MiniCPM3Config", fields=_LATENT),
    # Tied weights are lost when this class is written and read.
    "YoutuForCausalLM": ParityCase(config="YoutuConfig", fields={**_LATENT, "tie_word_embeddings": False}),
    "LongcatFlashForCausalLM": ParityCase(
        config="LongcatFlashConfig",
        fields={
            **{name: value for name, value in _LATENT.items() if name != "num_hidden_layers"},
            "num_layers": 2,
            "head_dim": 8,
            "ffn_hidden_size": 112,
            "expert_ffn_hidden_size": 32,
            "moe_topk": 2,
            "n_routed_experts": 8,
            "zero_expert_num": 4,
        },
    ),
    "BartForCausalLM": ParityCase(config="BartConfig", fields=_SCALED),
    "BigBirdPegasusForCausalLM": ParityCase(config="BigBirdPegasusConfig", fields=_SCALED),
    "BlenderbotForCausalLM": ParityCase(config="BlenderbotConfig", fields=_SCALED),
    "BlenderbotSmallForCausalLM": ParityCase(config="BlenderbotSmallConfig", fields=_SCALED),
    "MBartForCausalLM": ParityCase(config="MBartConfig", fields=_SCALED),
    "MarianForCausalLM": ParityCase(config="MarianConfig", fields=_SCALED),
    "PLBartForCausalLM": ParityCase(config="PLBartConfig", fields=_SCALED),
    "PegasusForCausalLM": ParityCase(config="PegasusConfig", fields=_SCALED),
    "WhisperForCausalLM": ParityCase(
        config="WhisperConfig",
        fields={
            **{name: value for name, value in _BEHIND_ENCODER.items() if name != "max_position_embeddings"},
            "max_target_positions": 256,
        },
    ),
    "BertGenerationDecoder": ParityCase(config="BertGenerationConfig", fields=_BERT),
    "CTRLLMHeadModel": ParityCase(
        config="CTRLConfig",
        fields={
            "vocab_size": 200,
            "n_positions": 256,
            "n_embd": 64,
            "dff": 112,
            "n_layer": 3,
            "n_head": 4,
            "eos_token_id": 2,
        },
    ),
    "DbrxForCausalLM": ParityCase(
        config="DbrxConfig",
        fields={
            "vocab_size": 200,
            "max_seq_len": 256,
            "d_model": 64,
            "n_heads": 4,
            "n_layers": 3,
            "attn_config": {"rope_theta": 10000.0, "kv_n_heads": 2, "clip_qkv": 8.0},
            "ffn_config": {"hidden_size": 64, "ffn_hidden_size": 48, "moe_num_experts": 4, "moe_top_k": 2},
            "eos_token_id": 2,
        },
    ),
    "CohereCompassForCausalLM": ParityCase(
        config="CohereCompassTextConfig",
        fields={
            **LLAMA_FIELDS,
            "sliding_window": 20,
            "logit_scale": 0.5,
            "layer_types": _WINDOWS,
            "rope_parameters": {kind: {"rope_type": "default", "rope_theta": 10000.0} for kind in _WINDOWS},
        },
    ),
    "Gemma3nForCausalLM": ParityCase(
        config="Gemma3nTextConfig", fields={**_PER_LAYER_INPUT, "num_kv_shared_layers": 2, "laurel_rank": 8}
    ),
    "Gemma4ForCausalLM": ParityCase(config="Gemma4TextConfig", fields={**_PER_LAYER_INPUT, "global_head_dim": 24}),
    "Gemma4UnifiedForCausalLM": ParityCase(config="Gemma4UnifiedTextConfig", fields={**_GEMMA, "global_head_dim": 24}),
    "HrmTextForCausalLM": ParityCase(
        config="HrmTextConfig",
        fields={**_PER_HEAD, "num_hidden_layers": 1, "head_dim": 16, "H_cycles": 2, "L_cycles": 2},
    ),
    "JetMoeForCausalLM": ParityCase(
        config="JetMoeConfig",
        fields={
            **{name: value for name, value in LLAMA_FIELDS.items() if name != "num_attention_heads"},
            "kv_channels": 16,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
        },
    ),
    "MiMoV2FlashForCausalLM": ParityCase(
        config="MiMoV2FlashConfig",
        fields={
            **LLAMA_FIELDS,
            "head_dim": 24,
            "v_head_dim": 16,
            "sliding_window": 20,
            "moe_intermediate_size": 48,
            "n_routed_experts": 8,
            "num_experts_per_tok": 2,
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
        },
    ),
    "MllamaForCausalLM": ParityCase(config="MllamaTextConfig", fields={**LLAMA_FIELDS, "cross_attention_layers": []}),
    "MoshiForCausalLM": ParityCase(
        config="MoshiConfig", fields={**_PER_HEAD, "ffn_dim": 112, "head_dim": 16, "sliding_window": 256}
    ),
    "Phi4MultimodalForCausalLM": ParityCase(
        config="Phi4MultimodalConfig",
        fields={
            **LLAMA_FIELDS,
            "vision_config": {**_ENCODER, "num_hidden_layers": 1},
            "audio_config": {**_ENCODER, "num_blocks": 1, "ext_pw_out_channel": 16, "nemo_conv_channels": 16},
        },
    ),
}
"""Architecture -> its case."""

FALLBACK_SAMPLE = (
    "BartForCausalLM",  # positions that bodies do not take, a body in a wrapper
    "CwmForCausalLM",  # windows in some layers
    "Gemma4ForCausalLM",  # layers with heads of other sizes, and shared keys
    "GraniteMoeSWAForCausalLM",  # sinks, experts
    "HrmTextForCausalLM",  # layers that run again and again
    "LongcatFlashForCausalLM",  # latent attention, two of them in a layer
    "MiMoV2FlashForCausalLM",  # layers with fewer heads, narrower values
    "RobertaForCausalLM",  # positions that do not begin at 0
)
"""One for each way in which the backend treats a network: the test suite verifies these. The others run through the
same code, and are verified when they, their case or the backend change (docs/models.md)."""

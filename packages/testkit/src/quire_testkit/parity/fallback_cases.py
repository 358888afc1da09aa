"""Parity cases of architectures that run through Transformers, with Quire's attention."""

from __future__ import annotations

from quire_testkit.parity.case import LLAMA_FIELDS, ParityCase, case, without

__all__ = ["FALLBACK_CASES", "FALLBACK_SAMPLE", "RECURRENT_FALLBACKS"]

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

RECURRENT_FALLBACKS: dict[str, ParityCase] = {
    "Lfm3ForCausalLM": case("Lfm3Config", tolerance=1e-3, num_hidden_layers=5, head_dim=16, sliding_window=20),
    "ZambaForCausalLM": case(
        "ZambaConfig",
        _PER_HEAD,
        tolerance=1e-3,
        num_hidden_layers=5,
        attn_layer_period=2,
        attn_layer_offset=1,
        mamba_d_state=8,
        weight_scale=0.1,
    ),
    "ZayaForCausalLM": case(
        "ZayaConfig",
        without(_MOE, "intermediate_size", "num_experts_per_tok"),
        tolerance=1e-3,
        head_dim=16,
        num_experts=4,
        router_hidden_size=32,
        weight_scale=0.1,
    ),
}
"""Those with recurrent layers, whose states Transformers' own cache layers keep within a step."""

FALLBACK_CASES: dict[str, ParityCase] = {
    **RECURRENT_FALLBACKS,
    "BitNetForCausalLM": case("BitNetConfig"),
    "CwmForCausalLM": case("CwmConfig", head_dim=16, sliding_window=20, layer_types=_WINDOWS),
    "Emu3ForCausalLM": case("Emu3TextConfig"),
    "Ernie4_5ForCausalLM": case("Ernie4_5Config", head_dim=16),
    "Jais2ForCausalLM": case("Jais2Config"),
    "NanoChatForCausalLM": case("NanoChatConfig"),
    "VaultGemmaForCausalLM": case("VaultGemmaConfig", head_dim=16, sliding_window=20),
    "MellumForCausalLM": case("MellumConfig", _MOE),
    "AfmoeForCausalLM": case("AfmoeConfig", _MOE),
    "HunYuanMoEV1ForCausalLM": case("HunYuanMoEV1Config", _MOE, head_dim=16),
    "AriaTextForCausalLM": case("AriaTextConfig", _MOE),
    "BeamForCausalLM": case("BeamConfig", _MOE),
    "FlintForCausalLM": case("FlintConfig", _MOE),
    "Kolibri1ForCausalLM": case("Kolibri1Config", _MOE),
    "LagunaForCausalLM": case("LagunaConfig", _MOE),
    "MiniMaxM3VLForCausalLM": case("MiniMaxM3VLTextConfig", _MOE),
    "BertLMHeadModel": case("BertConfig", _BERT),
    "ElectraForCausalLM": case("ElectraConfig", _BERT, embedding_size=32),
    "ErnieForCausalLM": case("ErnieConfig", _BERT),
    "RoCBertForCausalLM": case("RoCBertConfig", _BERT),
    "CamembertForCausalLM": case("CamembertConfig", _BERT),
    "Data2VecTextForCausalLM": case("Data2VecTextConfig", _BERT),
    "RobertaForCausalLM": case("RobertaConfig", _BERT),
    "RobertaPreLayerNormForCausalLM": case("RobertaPreLayerNormConfig", _BERT),
    "XLMRobertaForCausalLM": case("XLMRobertaConfig", _BERT),
    "XLMRobertaXLForCausalLM": case("XLMRobertaXLConfig", _BERT),
    "XmodForCausalLM": case("XmodConfig", _BERT, languages=["en_XX"], default_language="en_XX"),
    "ModernBertDecoderForCausalLM": case(
        "ModernBertDecoderConfig",
        _PER_HEAD,
        cls_token_id=1,
        sep_token_id=2,
        local_attention=40,
        global_attn_every_n_layers=2,
    ),
    "AXK1ForCausalLM": case("AXK1Config", _LATENT_MOE),
    # Tied weights are lost when this class is written and read.
    "YoutuForCausalLM": case("YoutuConfig", _LATENT, tie_word_embeddings=False),
    "BartForCausalLM": case("BartConfig", _SCALED),
    "BigBirdPegasusForCausalLM": case("BigBirdPegasusConfig", _SCALED),
    "BlenderbotForCausalLM": case("BlenderbotConfig", _SCALED),
    "BlenderbotSmallForCausalLM": case("BlenderbotSmallConfig", _SCALED),
    "MBartForCausalLM": case("MBartConfig", _SCALED),
    "MarianForCausalLM": case("MarianConfig", _SCALED),
    "PLBartForCausalLM": case("PLBartConfig", _SCALED),
    "PegasusForCausalLM": case("PegasusConfig", _SCALED),
    "WhisperForCausalLM": case(
        "WhisperConfig", without(_BEHIND_ENCODER, "max_position_embeddings"), max_target_positions=256
    ),
    "BertGenerationDecoder": case("BertGenerationConfig", _BERT),
    "CTRLLMHeadModel": case(
        "CTRLConfig", {}, vocab_size=200, n_positions=256, n_embd=64, dff=112, n_layer=3, n_head=4, eos_token_id=2
    ),
    "CohereCompassForCausalLM": case(
        "CohereCompassTextConfig",
        sliding_window=20,
        logit_scale=0.5,
        layer_types=_WINDOWS,
        rope_parameters={kind: {"rope_type": "default", "rope_theta": 10000.0} for kind in _WINDOWS},
    ),
    "Gemma3nForCausalLM": case("Gemma3nTextConfig", _PER_LAYER_INPUT, num_kv_shared_layers=2, laurel_rank=8),
    "Gemma4ForCausalLM": case("Gemma4TextConfig", _PER_LAYER_INPUT, global_head_dim=24),
    "Gemma4UnifiedForCausalLM": case("Gemma4UnifiedTextConfig", _GEMMA, global_head_dim=24),
    "HrmTextForCausalLM": case("HrmTextConfig", _PER_HEAD, num_hidden_layers=1, head_dim=16, H_cycles=2, L_cycles=2),
    "JetMoeForCausalLM": case(
        "JetMoeConfig",
        without(LLAMA_FIELDS, "num_attention_heads"),
        kv_channels=16,
        num_local_experts=4,
        num_experts_per_tok=2,
    ),
    "MllamaForCausalLM": case("MllamaTextConfig", cross_attention_layers=[1]),
    "MoshiForCausalLM": case("MoshiConfig", _PER_HEAD, ffn_dim=112, head_dim=16, sliding_window=256),
}
"""Architecture -> its case."""

FALLBACK_SAMPLE = (
    "BartForCausalLM",  # positions that bodies do not take, a body in a wrapper
    "CwmForCausalLM",  # windows in some layers
    "Gemma4ForCausalLM",  # layers with heads of other sizes, and shared keys
    "HrmTextForCausalLM",  # layers that run again and again
    "YoutuForCausalLM",  # latent attention
    "Lfm3ForCausalLM",  # recurrent layers
    "RobertaForCausalLM",  # positions that do not begin at 0
)
"""One for each way in which the backend treats a network: the test suite verifies these. The others run through the
same code, and are verified when they, their case or the backend change (docs/models.md)."""

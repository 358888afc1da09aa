"""Tiny configurations of architectures that see, and count positions one by one."""

from __future__ import annotations

from quire_testkit.parity.case import ParityCase
from quire_testkit.parity.media_parts import text, vision

__all__ = ["VISION_CASES"]


VISION_CASES: dict[str, ParityCase] = {
    "LlavaForConditionalGeneration": ParityCase(
        config="LlavaConfig",
        fields={
            "text_config": text("llama"),
            "vision_config": vision("clip_vision_model", projection_dim=32),
            "image_token_index": 190,
        },
    ),
    "LlavaNextForConditionalGeneration": ParityCase(
        config="LlavaNextConfig",
        fields={
            "text_config": text("mistral", sliding_window=None),
            "vision_config": vision("clip_vision_model", projection_dim=32),
            "image_grid_pinpoints": [[32, 64], [64, 32], [64, 64]],
            "image_token_index": 190,
        },
    ),
    "LlavaOnevisionForConditionalGeneration": ParityCase(
        config="LlavaOnevisionConfig",
        fields={
            "text_config": text("qwen2"),
            "vision_config": vision("siglip_vision_model"),
            "image_grid_pinpoints": [[32, 64], [64, 32], [64, 64]],
            "image_token_index": 190,
            "video_token_index": 191,
        },
    ),
    "FastVlmForConditionalGeneration": ParityCase(
        config="FastVlmConfig",
        fields={
            "text_config": text("qwen2"),
            "vision_config": {  # published ones have a tower of timm, whose features are of this form
                "model_type": "resnet",
                "embedding_size": 8,
                "hidden_sizes": [16, 32],
                "depths": [1, 1],
                "layer_type": "basic",
                "hidden_size": 32,
            },
            "image_token_index": 190,
        },
    ),
    "PerceptionLMForConditionalGeneration": ParityCase(
        config="PerceptionLMConfig",
        fields={
            "text_config": text("llama"),
            "vision_config": vision("siglip_vision_model", vision_use_head=False, model_args={"embed_dim": 32}),
            "vision_use_cls_token": False,  # as a tower of timm, which published ones have
            "projector_pooling_ratio": 2,
            "image_token_id": 190,
            "video_token_id": 191,
        },
    ),
    "Idefics3ForConditionalGeneration": ParityCase(
        config="Idefics3Config",
        fields={
            "text_config": text("llama"),
            "vision_config": vision("idefics3_vision"),
            "scale_factor": 2,
            "image_token_id": 190,
        },
    ),
    "SmolVLMForConditionalGeneration": ParityCase(
        config="SmolVLMConfig",
        fields={
            "text_config": text("llama"),
            "vision_config": vision("smolvlm_vision"),
            "scale_factor": 2,
            "image_token_id": 190,
        },
    ),
    "InternVLForConditionalGeneration": ParityCase(
        config="InternVLConfig",
        fields={
            "text_config": text("qwen2"),
            "vision_config": vision("internvl_vision", image_size=[32, 32], patch_size=[8, 8]),
            "image_token_id": 190,
        },
    ),
    "Llama4ForConditionalGeneration": ParityCase(
        config="Llama4Config",
        fields={
            "text_config": text(
                "llama4_text",
                head_dim=16,
                intermediate_size_mlp=112,
                num_hidden_layers=4,
                num_local_experts=4,
                attention_chunk_size=32,
                pad_token_id=None,
            ),
            "vision_config": {
                "hidden_size": 32,
                "intermediate_size": 128,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
                "image_size": 32,
                "patch_size": 8,
                "vision_output_dim": 48,
                "projector_input_dim": 48,
                "projector_output_dim": 48,
                "pixel_shuffle_ratio": 0.5,
            },
            "image_token_index": 190,
        },
    ),
    "AyaVisionForConditionalGeneration": ParityCase(
        config="AyaVisionConfig",
        fields={
            "text_config": text("cohere2", sliding_window=32, num_hidden_layers=4, logit_scale=1.0),
            "vision_config": vision("siglip_vision_model"),
            "image_token_index": 190,
        },
    ),
    "Ovis2ForConditionalGeneration": ParityCase(
        config="Ovis2Config",
        fields={
            "text_config": text("qwen2"),
            "vision_config": vision("", vocab_size=24, hidden_stride=2, num_visual_indicator_tokens=5),
            "hidden_size": 64,
            "vocab_size": 200,
            "image_token_id": 190,
            "visual_indicator_token_ids": [191, 193, 194, 195, 196],
        },
    ),
    "AriaForConditionalGeneration": ParityCase(
        config="AriaConfig",
        fields={
            "image_token_index": 190,
            "projector_patch_to_query_dict": {16: 4},
            "vision_config": vision("idefics3_vision"),
            "text_config": text("aria_text", head_dim=16, moe_num_experts=4, moe_num_shared_experts=1),
            "tie_word_embeddings": False,
        },
    ),
    "Cohere2VisionForConditionalGeneration": ParityCase(
        config="Cohere2VisionConfig",
        fields={
            "image_token_id": 190,
            "vision_config": vision("siglip_vision_model"),
            "text_config": text("cohere2", head_dim=16, sliding_window=32, num_hidden_layers=4, logit_scale=1.0),
            "tie_word_embeddings": False,
        },
    ),
    "DeepseekVLForConditionalGeneration": ParityCase(
        config="DeepseekVLConfig",
        fields={
            "image_token_id": 190,
            "vision_config": vision("siglip_vision_model"),
            "text_config": text("llama", head_dim=16),
            "tie_word_embeddings": False,
        },
    ),
    "GotOcr2ForConditionalGeneration": ParityCase(
        config="GotOcr2Config",
        fields={
            "image_token_index": 190,
            "text_config": text("qwen2", sliding_window=None),
            "vision_config": {
                "model_type": "got_ocr2_vision",
                "hidden_size": 32,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
                "image_size": 32,
                "patch_size": 8,
                "mlp_dim": 48,
                "window_size": 16,
            },
            "tie_word_embeddings": False,
        },
    ),
    "Idefics2ForConditionalGeneration": ParityCase(
        config="Idefics2Config",
        fields={
            "image_token_id": 190,
            "text_config": text("mistral", head_dim=16, sliding_window=None),
            "vision_config": vision("idefics2_vision"),
            "perceiver_config": {
                "model_type": "idefics2_perceiver",
                "hidden_size": 32,
                "num_key_value_heads": 2,
                "resampler_n_latents": 4,
                "resampler_depth": 1,
            },
            "tie_word_embeddings": False,
        },
    ),
    "LlavaNextVideoForConditionalGeneration": ParityCase(
        config="LlavaNextVideoConfig",
        fields={
            "image_token_index": 190,
            "image_grid_pinpoints": [[32, 64], [64, 32], [64, 64]],
            "video_token_index": 191,
            "vision_config": vision("clip_vision_model", projection_dim=32),
            "text_config": text("llama", head_dim=16),
            "tie_word_embeddings": False,
        },
    ),
    "QianfanOCRForConditionalGeneration": ParityCase(
        config="QianfanOCRConfig",
        fields={
            "image_token_id": 190,
            "text_config": text("qwen3", head_dim=16, sliding_window=None),
            "vision_config": vision("qianfan_ocr_vision"),
            "tie_word_embeddings": False,
        },
    ),
    "VideoLlavaForConditionalGeneration": ParityCase(
        config="VideoLlavaConfig",
        fields={
            "image_token_index": 190,
            "video_token_index": 191,
            "text_config": text("llama", head_dim=16),
            "vision_config": vision("clip_vision_model", projection_dim=32),
            "tie_word_embeddings": False,
        },
    ),
    "VipLlavaForConditionalGeneration": ParityCase(
        config="VipLlavaConfig",
        fields={
            "image_token_index": 190,
            "vision_feature_layers": [-1, -2],
            "text_config": text("llama", head_dim=16),
            "vision_config": vision("clip_vision_model", projection_dim=32),
            "tie_word_embeddings": False,
        },
    ),
    "Qwen3OmniMoeThinkerForConditionalGeneration": ParityCase(
        config="Qwen3OmniMoeThinkerConfig",
        fields={
            "image_token_id": 190,
            "video_token_id": 191,
            "audio_token_id": 192,
            "text_config": text(
                "qwen3_omni_moe_text",
                num_experts=4,
                num_experts_per_tok=2,
                moe_intermediate_size=48,
                sliding_window=None,
            ),
            "vision_config": {
                "model_type": "qwen3_omni_moe_vision_encoder",
                "hidden_size": 32,
                "intermediate_size": 48,
                "num_heads": 2,
                "depth": 2,
                "patch_size": 4,
                "out_hidden_size": 64,
                "num_position_embeddings": 16,
                "deepstack_visual_indexes": [0],
            },
            "audio_config": {
                "model_type": "qwen3_omni_moe_audio_encoder",
                "encoder_layers": 2,
                "encoder_attention_heads": 2,
                "encoder_ffn_dim": 48,
                "d_model": 32,
                "num_mel_bins": 16,
                "max_source_positions": 32,
                "output_dim": 64,
                "n_window": 4,
                "n_window_infer": 8,
            },
            "vision_start_token_id": 195,
            "tie_word_embeddings": False,
        },
    ),
    "DeepseekVLHybridForConditionalGeneration": ParityCase(
        config="DeepseekVLHybridConfig",
        fields={
            "image_token_id": 190,
            "vision_config": vision("siglip_vision_model"),
            "high_res_vision_config": {
                "model_type": "sam_vision_model",
                "hidden_size": 32,
                "output_channels": 16,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
                "image_size": 128,
                "patch_size": 8,
                "window_size": 4,
                "global_attn_indexes": [1],
            },
            "text_config": text("llama", head_dim=16),
            "tie_word_embeddings": False,
        },
    ),
    "Blip2ForConditionalGeneration": ParityCase(
        config="Blip2Config",
        fields={
            "image_token_index": 190,
            "num_query_tokens": 4,
            "vision_config": vision(""),
            "qformer_config": {
                "hidden_size": 32,
                "intermediate_size": 48,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
            },
            "text_config": text("opt", ffn_dim=112, word_embed_proj_dim=64),
        },
    ),
    "JanusForConditionalGeneration": ParityCase(
        config="JanusConfig",
        fields={
            "image_token_id": 190,
            "vision_config": vision("", num_image_tokens=16, projection_dim=64, mlp_ratio=2.0),
            "vq_config": {
                "base_channels": 32,
                "channel_multiplier": [1, 1],
                "num_res_blocks": 1,
                "latent_channels": 8,
                "num_embeddings": 16,
                "projection_dim": 64,
                "image_token_embed_dim": 64,
            },
            "text_config": text("llama", head_dim=16),
            "tie_word_embeddings": False,
        },
    ),
    "Step3p7ForConditionalGeneration": ParityCase(
        config="Step3p7Config",
        fields={
            "image_token_id": 190,
            "vision_config": vision("", mlp_ratio=1.5),
            "text_config": text(
                "step3p5",
                head_dim=16,
                num_local_experts=4,
                n_routed_experts=4,
                num_experts_per_tok=2,
                moe_intermediate_size=48,
                share_expert_dim=48,
                mlp_layer_types=["dense", "sparse", "sparse"],
                sliding_window=20,
                layer_types=["full_attention", "sliding_attention", "full_attention"],
            ),
            "tie_word_embeddings": False,
        },
    ),
    "MllamaForConditionalGeneration": ParityCase(
        config="MllamaConfig",
        fields={
            "image_token_index": 190,
            "text_config": text("mllama_text_model", num_hidden_layers=5, cross_attention_layers=[1, 3]),
            "vision_config": {
                "model_type": "mllama_vision_model",
                "hidden_size": 32,
                "intermediate_size": 48,
                "num_hidden_layers": 2,
                "num_global_layers": 1,
                "attention_heads": 2,
                "intermediate_layers_indices": [0, 1],
                "vision_output_dim": 96,
                "image_size": 32,
                "patch_size": 8,
            },
        },
    ),
    "DeepseekOcr2ForConditionalGeneration": ParityCase(
        config="DeepseekOcr2Config",
        fields={
            "image_token_id": 190,
            "text_config": text(
                "deepseek_ocr2_text",
                max_position_embeddings=2048,
                n_routed_experts=4,
                num_experts_per_tok=2,
                moe_intermediate_size=48,
                n_shared_experts=1,
                mlp_layer_types=["dense", "sparse", "sparse"],
            ),
            "vision_config": {
                "sam_config": {
                    "hidden_size": 32,
                    "output_channels": 16,
                    "num_hidden_layers": 2,
                    "num_attention_heads": 2,
                    "image_size": 128,
                    "patch_size": 8,
                    "window_size": 4,
                    "global_attn_indexes": [1],
                    "downsample_channels": [24, 32],
                },
                "encoder_config": {
                    "hidden_size": 32,
                    "intermediate_size": 48,
                    "num_hidden_layers": 2,
                    "num_attention_heads": 2,
                    "num_key_value_heads": 2,
                    "vocab_size": 10,
                },
            },
        },
    ),
}

"""Tiny configurations of architectures that hear."""

from __future__ import annotations

from quire_testkit.parity.case import LLAMA_FIELDS, ParityCase
from quire_testkit.parity.media_parts import text, vision

__all__ = ["AUDIO_CASES"]

AUDIO_CASES: dict[str, ParityCase] = {
    "Qwen2AudioForConditionalGeneration": ParityCase(
        config="Qwen2AudioConfig",
        fields={
            "text_config": text("qwen2"),
            "audio_config": {
                "model_type": "qwen2_audio_encoder",
                "d_model": 32,
                "encoder_layers": 2,
                "encoder_attention_heads": 2,
                "encoder_ffn_dim": 48,
                "num_mel_bins": 16,
                "max_source_positions": 30,
            },
            "audio_token_index": 190,
        },
    ),
    "AudioFlamingo3ForConditionalGeneration": ParityCase(
        config="AudioFlamingo3Config",
        fields={
            "text_config": text("qwen2"),
            "audio_config": {
                "model_type": "audioflamingo3_encoder",
                "hidden_size": 32,
                "intermediate_size": 48,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
                "num_mel_bins": 16,
                "max_source_positions": 32,
            },
            "audio_token_id": 190,
        },
    ),
    "VoxtralForConditionalGeneration": ParityCase(
        config="VoxtralConfig",
        fields={
            "text_config": text("llama", head_dim=16),
            "audio_config": {
                "model_type": "voxtral_encoder",
                "hidden_size": 32,
                "intermediate_size": 128,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
                "num_mel_bins": 16,
                "max_source_positions": 32,
            },
            "audio_token_id": 190,
        },
    ),
    "VoxtralRealtimeForConditionalGeneration": ParityCase(
        config="VoxtralRealtimeConfig",
        fields={
            "text_config": text("voxtral_realtime_text", head_dim=16, sliding_window=24),
            "audio_config": {
                "model_type": "voxtral_realtime_encoder",
                "hidden_size": 32,
                "intermediate_size": 48,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
                "head_dim": 16,
                "num_mel_bins": 16,
                "sliding_window": 30,
            },
            "default_num_delay_tokens": 3,
        },
    ),
    "GlmAsrForConditionalGeneration": ParityCase(
        config="GlmAsrConfig",
        fields={
            "audio_token_id": 190,
            "text_config": text("llama", head_dim=16),
            "audio_config": {
                "model_type": "glmasr_encoder",
                "hidden_size": 32,
                "intermediate_size": 128,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
                "num_mel_bins": 16,
                "num_key_value_heads": 2,
                "max_position_embeddings": 64,
            },
            "tie_word_embeddings": False,
        },
    ),
    "GraniteSpeechForConditionalGeneration": ParityCase(
        config="GraniteSpeechConfig",
        fields={
            "audio_token_index": 190,
            "text_config": text("granite"),
            "encoder_config": {
                "model_type": "granite_speech_encoder",
                "num_heads": 2,
                "output_dim": 64,
                "num_layers": 2,
                "input_dim": 16,
                "hidden_dim": 32,
                "feedforward_mult": 2,
                "dim_head": 16,
            },
            "projector_config": {
                "model_type": "blip_2_qformer",
                "hidden_size": 32,
                "intermediate_size": 48,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
                "encoder_hidden_size": 32,
                "cross_attention_frequency": 2,
                "max_position_embeddings": 64,
            },
            "tie_word_embeddings": False,
        },
    ),
    "GraniteSpeechPlusForConditionalGeneration": ParityCase(
        config="GraniteSpeechPlusConfig",
        fields={
            "audio_token_index": 190,
            "text_config": text("granite"),
            "encoder_config": {
                "model_type": "granite_speech_plus_encoder",
                "num_heads": 2,
                "output_dim": 64,
                "num_layers": 2,
                "input_dim": 16,
                "hidden_dim": 32,
                "feedforward_mult": 2,
                "dim_head": 16,
                "cat_hidden_layers": [1],
            },
            "projector_config": {
                "model_type": "blip_2_qformer",
                "hidden_size": 32,
                "intermediate_size": 48,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
                "encoder_hidden_size": 64,
                "cross_attention_frequency": 2,
                "max_position_embeddings": 64,
            },
            "tie_word_embeddings": False,
        },
    ),
    "MusicFlamingoForConditionalGeneration": ParityCase(
        config="MusicFlamingoConfig",
        fields={
            "text_config": text("qwen2"),
            "audio_config": {
                "model_type": "audioflamingo3_encoder",
                "hidden_size": 32,
                "intermediate_size": 48,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
                "num_mel_bins": 16,
                "max_source_positions": 32,
            },
            "audio_token_id": 190,
            "audio_bos_token_id": 192,
            "audio_eos_token_id": 193,
        },
    ),
    "MossTranscribeDiarizeForConditionalGeneration": ParityCase(
        config="MossTranscribeDiarizeConfig",
        fields={
            "audio_token_id": 190,
            "text_config": text("qwen3", head_dim=16, sliding_window=None),
            "audio_config": {
                "model_type": "moss_transcribe_diarize_audio",
                "hidden_size": 32,
                "intermediate_size": 48,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
                "num_mel_bins": 16,
                "max_source_positions": 32,
            },
            "tie_word_embeddings": False,
        },
    ),
    "FunAsrNanoForConditionalGeneration": ParityCase(
        config="FunAsrNanoConfig",
        fields={
            "audio_token_id": 190,
            "text_config": text("qwen3", head_dim=16, sliding_window=None),
            "audio_config": {
                "model_type": "fun_asr_nano_encoder",
                "num_mel_bins": 4,
                "num_stacked_frames": 4,
                "hidden_size": 32,
                "intermediate_size": 48,
                "num_hidden_layers": 4,
                "num_attention_heads": 2,
                "num_timestamp_prediction_layers": 1,
                "max_position_embeddings": 65,
            },
            "adaptor_config": {
                "hidden_size": 64,
                "intermediate_size": 16,
                "num_hidden_layers": 1,
                "num_attention_heads": 2,
                "projector_hidden_size": 48,
            },
            "tie_word_embeddings": False,
        },
    ),
    "Phi4MultimodalForCausalLM": ParityCase(
        config="Phi4MultimodalConfig",
        fields={
            **LLAMA_FIELDS,
            "original_max_position_embeddings": 256,
            "vision_config": vision("phi4_multimodal_vision", crop_size=32, image_token_id=190, num_hidden_layers=3),
            "audio_config": {
                "hidden_size": 32,
                "intermediate_size": 48,
                "num_blocks": 2,
                "num_attention_heads": 2,
                "ext_pw_out_channel": 32,
                "depthwise_separable_out_channel": 32,
                "nemo_conv_channels": 16,
                "input_size": 16,
                "audio_token_id": 191,
            },
        },
    ),
    "Qwen3ASRForConditionalGeneration": ParityCase(
        config="Qwen3ASRConfig",
        fields={
            "audio_token_id": 190,
            "audio_config": {
                "model_type": "qwen3_asr_encoder",
                "encoder_layers": 2,
                "encoder_attention_heads": 2,
                "encoder_ffn_dim": 48,
                "d_model": 32,
                "num_mel_bins": 16,
                "output_dim": 64,
                "max_position_embeddings": 64,
            },
            "text_config": text("qwen3", head_dim=16, sliding_window=None),
            "tie_word_embeddings": False,
        },
    ),
}
"""Architecture -> its case."""

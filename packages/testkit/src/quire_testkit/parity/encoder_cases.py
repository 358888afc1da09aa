"""Parity cases of networks with an encoder."""

from __future__ import annotations

from typing import Any

from quire_testkit.parity.case import LLAMA_FIELDS, ParityCase, case, without

__all__ = ["ENCODER_CASES"]

_BART_FIELDS: dict[str, Any] = {
    "vocab_size": 200,
    "d_model": 64,
    "encoder_layers": 3,
    "decoder_layers": 2,
    "encoder_ffn_dim": 80,
    "decoder_ffn_dim": 112,
    "encoder_attention_heads": 8,
    "decoder_attention_heads": 4,
    "max_position_embeddings": 256,
    "scale_embedding": True,
}

_T5_FIELDS: dict[str, Any] = {
    "vocab_size": 200,
    "d_model": 64,
    "d_kv": 12,
    "d_ff": 112,
    "num_layers": 3,
    "num_decoder_layers": 2,
    "num_heads": 4,
    "relative_attention_num_buckets": 16,
    "relative_attention_max_distance": 40,
    "decoder_start_token_id": 0,
}

_T5_SCALE = 0.1
"""Of weights: scores are not divided by the root of the head dimension, and softmax would be all maximum."""

_BERT_FIELDS = {**LLAMA_FIELDS, "type_vocab_size": 2}

_DISTIL_FIELDS = {
    "vocab_size": 200,
    "dim": 64,
    "hidden_dim": 112,
    "n_layers": 3,
    "n_heads": 4,
    "max_position_embeddings": 256,
}

_DEBERTA_FIELDS = {
    **without(LLAMA_FIELDS, "num_key_value_heads"),
    "relative_attention": True,
    "position_buckets": 16,
    "max_relative_positions": 64,
    "norm_rel_ebd": "layer_norm",
    "share_att_key": True,
    "pos_att_type": ["p2c", "c2p"],
    "position_biased_input": False,
}
"""As of version 3, with ranges of distances that the prompts pass."""

_CONFORMER_FIELDS: dict[str, Any] = {
    "hidden_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 80,
    "conv_kernel_size": 5,
    "subsampling_conv_channels": 8,
    "num_mel_bins": 16,
    "scale_input": False,
}
"""Of a Fast Conformer's encoder_config."""

_TRANSDUCER_FIELDS: dict[str, Any] = {
    "vocab_size": 12,
    "blank_token_id": 11,
    "pad_token_id": 2,
    "decoder_hidden_size": 32,
    "num_decoder_layers": 2,
    "max_symbols_per_step": 4,
    "encoder_config": _CONFORMER_FIELDS,
}

ENCODER_CASES: dict[str, ParityCase] = {
    "BartForConditionalGeneration": case("BartConfig", _BART_FIELDS),
    "MBartForConditionalGeneration": case("MBartConfig", _BART_FIELDS),
    "T5ForConditionalGeneration": case("T5Config", _T5_FIELDS, weight_scale=_T5_SCALE),
    "MT5ForConditionalGeneration": case("MT5Config", _T5_FIELDS, weight_scale=_T5_SCALE),
    "WhisperForConditionalGeneration": case(
        "WhisperConfig",
        {},
        vocab_size=200,
        d_model=64,
        encoder_layers=2,
        decoder_layers=3,
        encoder_attention_heads=2,
        decoder_attention_heads=4,
        encoder_ffn_dim=96,
        decoder_ffn_dim=112,
        num_mel_bins=16,
        max_source_positions=45,
        max_target_positions=160,
        decoder_start_token_id=5,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
        suppress_tokens=None,
        begin_suppress_tokens=None,
    ),
    "MoonshineForConditionalGeneration": case(
        "MoonshineConfig",
        {},
        vocab_size=200,
        hidden_size=64,
        intermediate_size=96,
        encoder_num_hidden_layers=2,
        decoder_num_hidden_layers=3,
        encoder_num_attention_heads=4,
        decoder_num_attention_heads=4,
        max_position_embeddings=160,
        decoder_start_token_id=5,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    ),
    "MoonshineStreamingForConditionalGeneration": case(
        "MoonshineStreamingConfig",
        {},
        vocab_size=200,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=4,
        max_position_embeddings=160,
        decoder_start_token_id=5,
        encoder_config={
            "hidden_size": 48,
            "intermediate_size": 192,  # as its decoder's two parts together
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "sliding_windows": [[9, 3], [7, 0], [5, 1]],
        },
    ),
    "CohereAsrForConditionalGeneration": case(
        "CohereAsrConfig",
        {},
        vocab_size=200,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        max_position_embeddings=160,
        decoder_start_token_id=5,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
        encoder_config=_CONFORMER_FIELDS,
    ),
    "CanaryForConditionalGeneration": case(
        "CanaryConfig",
        {},
        weight_scale=0.25,
        vocab_size=200,
        decoder_start_token_id=5,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
        encoder_config={**_CONFORMER_FIELDS, "hidden_size": 64, "scale_input": True},
        decoder_config={
            "vocab_size": 200,
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "head_dim": 16,
            "max_position_embeddings": 160,
        },
    ),
    "ParakeetForCTC": case("ParakeetCTCConfig", {}, vocab_size=12, pad_token_id=11, encoder_config=_CONFORMER_FIELDS),
    "ParakeetForRNNT": case("ParakeetRNNTConfig", _TRANSDUCER_FIELDS),
    "ParakeetForTDT": case("ParakeetTDTConfig", _TRANSDUCER_FIELDS),
    "AlbertModel": case("AlbertConfig", _BERT_FIELDS, embedding_size=32, num_hidden_groups=2, inner_group_num=2),
    "BertModel": case("BertConfig", _BERT_FIELDS),
    "CamembertModel": case("CamembertConfig", _BERT_FIELDS, pad_token_id=1, bos_token_id=0),
    "DebertaV2Model": case("DebertaV2Config", _DEBERTA_FIELDS),
    "DistilBertModel": case("DistilBertConfig", _DISTIL_FIELDS),
    "ElectraModel": case("ElectraConfig", _BERT_FIELDS, embedding_size=32),
    "EuroBertModel": case("EuroBertConfig", mask_token_id=3),
    "GteModel": case("GteConfig", without(LLAMA_FIELDS, "num_key_value_heads")),
    "JinaEmbeddingsV3Model": case("JinaEmbeddingsV3Config", without(LLAMA_FIELDS, "num_key_value_heads")),
    "MPNetModel": case("MPNetConfig", _BERT_FIELDS, pad_token_id=1, bos_token_id=0),
    "MT5EncoderModel": case("MT5Config", _T5_FIELDS, weight_scale=_T5_SCALE, seed=1),
    "NomicBertModel": case("NomicBertConfig", without(LLAMA_FIELDS, "num_key_value_heads")),
    "T5EncoderModel": case("T5Config", _T5_FIELDS, weight_scale=_T5_SCALE),
    "UMT5EncoderModel": case("UMT5Config", _T5_FIELDS, weight_scale=_T5_SCALE),
    "RobertaModel": case("RobertaConfig", _BERT_FIELDS, pad_token_id=1, bos_token_id=0),
    "XLMRobertaModel": case("XLMRobertaConfig", _BERT_FIELDS, pad_token_id=1, bos_token_id=0),
    "ModernBertModel": case(
        "ModernBertConfig", num_hidden_layers=4, local_attention=16, cls_token_id=1, sep_token_id=2
    ),
    "UMT5ForConditionalGeneration": case("UMT5Config", _T5_FIELDS, weight_scale=_T5_SCALE),
}

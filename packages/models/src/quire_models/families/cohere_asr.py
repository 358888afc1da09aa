"""Cohere ASR ("Cohere Transcribe"): a Fast Conformer, and a decoder that writes what is said."""

from __future__ import annotations

from quire_interfaces import Fields
from quire_models.config_fields import ACTIVATIONS
from quire_models.decoder_sizes import decoder_sizes
from quire_models.encoder_spec import start_token_ids
from quire_models.families.fast_conformer import conformer_decoder, fast_conformer
from quire_models.spec import LinearSpec, NetworkSpec

__all__ = ["spec"]

_ENCODER = {
    "hidden_size": 1280,
    "num_hidden_layers": 48,
    "intermediate_size": 5120,
    "num_mel_bins": 128,
    "scale_input": False,
}
_LONGEST_S = 35
"""`max_audio_clip_s` of its feature extractor."""
_NEMO_NAMES = (
    ("model.log_softmax.mlp.layer0", "proj_out"),
    ("log_softmax.mlp.layer0", "proj_out"),
    ("encoder_decoder_proj.", "decoder.proj."),
    ("encoder.pre_encode.conv.", "encoder.subsampling.layers."),
    ("encoder.pre_encode.out.", "encoder.subsampling.linear."),
    (".conv.batch_norm.", ".conv.norm."),
    (".self_attn.linear_pos.", ".self_attn.relative_k_proj."),
    (".self_attn.linear_q.", ".self_attn.q_proj."),
    (".self_attn.linear_k.", ".self_attn.k_proj."),
    (".self_attn.linear_v.", ".self_attn.v_proj."),
    (".self_attn.linear_out.", ".self_attn.o_proj."),
    (".self_attn.pos_bias_", ".self_attn.bias_"),
    ("transf_decoder._embedding.position_embedding.pos_enc", "decoder.pos_emb.weight"),
    ("transf_decoder._embedding.token_embedding.", "decoder.embed_tokens."),
    ("transf_decoder._embedding.layer_norm.", "decoder.embedding_layernorm."),
    ("transf_decoder._decoder.final_layer_norm.", "decoder.norm."),
    ("transf_decoder._decoder.layers.", "decoder.layers."),
    (".first_sub_layer.", ".self_attn."),
    (".second_sub_layer.", ".encoder_attn."),
    (".query_net.", ".q_proj."),
    (".key_net.", ".k_proj."),
    (".value_net.", ".v_proj."),
    (".out_projection.", ".o_proj."),
    (".third_sub_layer.dense_in.", ".mlp.fc1."),
    (".third_sub_layer.dense_out.", ".mlp.fc2."),
    (".layer_norm_1.", ".input_layernorm."),
    (".layer_norm_2.", ".post_attention_layernorm."),
    (".layer_norm_3.", ".final_layernorm."),
)
"""What its checkpoints call parts, which are NeMo's names, and what Transformers and this network call them."""


def spec(config: Fields) -> NetworkSpec:
    """Positions are learned, and what the encoder gives is projected to the decoder's width."""
    named = config.named(rms_norm_eps="-")
    sizes = decoder_sizes(named, act="relu", acts=ACTIVATIONS, eps=1e-5, rotary=False, context=1024)
    conformer = fast_conformer(config, _ENCODER)
    return conformer_decoder(
        sizes,
        conformer,
        bias=config.flag("attention_bias", default=True),
        positions=sizes.positions("pos_emb"),
        projection=LinearSpec(
            name="model.decoder.proj", in_features=conformer.hidden_size, out_features=sizes.hidden_size, bias=True
        ),
        start_token_ids=start_token_ids(config, config.token_ids("bos_token_id")),
        longest_s=_LONGEST_S,
        default_prefix="model.",
        renamed=_NEMO_NAMES,
    )

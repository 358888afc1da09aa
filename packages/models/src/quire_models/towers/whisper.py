"""Whisper's encoder (Radford et al. 2022) in Qwen2-Audio (Chu et al. 2024) and Voxtral (Liu et al. 2025)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from quire_interfaces import Fields, Modality
from quire_models.encoder_spec import EncoderAttentionSpec
from quire_models.feed_forward_spec import MLPSpec
from quire_models.mixer_spec import BART_NAMES
from quire_models.spec import LayerSpec, LinearSpec, NormSpec
from quire_models.towers.reading import activation_name, mlp_projector
from quire_models.towers.tower_spec import ConnectorStep, ConvolutionSpec, MergeSpec, SoundTowerSpec, padded_size

__all__ = ["spec_of_qwen2_audio", "spec_of_voxtral"]

_EPS = 1e-5
"""Of every norm: the classes have torch's own."""


def spec_of_qwen2_audio(values: Mapping[str, Any], hidden_size: int) -> SoundTowerSpec | None:
    """Frames that are no sound are not read; two tokens become one."""
    audio = Fields(values.get("audio_config") or {}, "config.json: audio_config")
    width = audio.integer("d_model", default=1280, minimum=1)
    projection = LinearSpec(name="multi_modal_projector.linear", in_features=width, out_features=hidden_size, bias=True)
    inputs = ("input_features", "feature_attention_mask")
    return _tower(audio, width, inputs, (projection,), pools_pairs=True)


def spec_of_voxtral(values: Mapping[str, Any], hidden_size: int) -> SoundTowerSpec | None:
    """Four tokens become one, windows are read to their end."""
    named = {
        "d_model": "hidden_size",
        "encoder_layers": "num_hidden_layers",
        "encoder_attention_heads": "num_attention_heads",
        "encoder_ffn_dim": "intermediate_size",
    }
    audio = Fields(values.get("audio_config") or {}, "config.json: audio_config").named(**named)
    width = audio.integer("d_model", default=1280, minimum=1)
    merged = audio.integer("encoder_ffn_dim", default=5120, minimum=1)
    act = activation_name(values.get("projector_hidden_act", "gelu"))
    if act is None or merged % width:
        return None
    products = mlp_projector("multi_modal_projector", merged, hidden_size, act, bias=False)
    steps = (MergeSpec(num_tokens=merged // width), *products)
    return _tower(audio, width, ("input_features",), steps)


def _tower(
    audio: Fields,
    width: int,
    inputs: tuple[str, ...],
    connector: tuple[ConnectorStep, ...],
    *,
    pools_pairs: bool = False,
) -> SoundTowerSpec | None:
    """None for a variant that is not known."""
    heads = audio.integer("encoder_attention_heads", default=20, minimum=1)
    inner = audio.integer("encoder_ffn_dim", default=5120, minimum=1)
    act = activation_name(audio.text("activation_function", default="gelu"))
    if act is None or width % heads:
        return None

    def norm(name: str) -> NormSpec:
        return NormSpec(name=name, size=width, eps=_EPS, kind="layer", has_bias=True)

    attention = EncoderAttentionSpec(
        name="self_attn",
        hidden_size=width,
        num_heads=heads,
        head_dim=width // heads,
        scale=(width // heads) ** -0.5,
        bias=True,
        names=BART_NAMES,
        unbiased=(BART_NAMES.key,),
    )
    layers = tuple(
        LayerSpec(
            name=f"audio_tower.layers.{layer}",
            mixers=(attention,),
            feed_forward=MLPSpec(name="", hidden_size=width, intermediate_size=padded_size(inner), act=act),
            input_norm=norm("self_attn_layer_norm"),
            feed_forward_norm=norm("final_layer_norm"),
        )
        for layer in range(audio.integer("encoder_layers", default=32, minimum=1))
    )
    bins = audio.integer("num_mel_bins", default=128, minimum=1)
    return SoundTowerSpec(
        inputs={Modality.AUDIO: inputs},
        convolutions=(
            ConvolutionSpec(name="audio_tower.conv1", in_channels=bins, out_channels=width, stride=1),
            ConvolutionSpec(name="audio_tower.conv2", in_channels=width, out_channels=width, stride=2),
        ),
        act=act,
        positions="audio_tower.embed_positions.weight",
        num_positions=audio.integer("max_source_positions", default=1500, minimum=1),
        layers=layers,
        intermediate_size=inner,
        pools_pairs=pools_pairs,
        final_norm=norm("audio_tower.layer_norm"),
        connector=connector,
    )

"""Muse Glimmer's text model (Meta 2026): gated attention with normalised heads, norms before and behind each part, a
normalised embedding, and every fourth layer without window and positions."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from quire_interfaces import Fields
from quire_models.config_fields import layer_thetas, layer_windows
from quire_models.decoder_sizes import decoder_sizes
from quire_models.mixer_spec import SelfAttentionSpec
from quire_models.spec import CheckpointNames, HeadSpec, LayerSpec, LinearSpec, NetworkSpec, NormSpec, Weight, inside

__all__ = ["OutputGatedSpec", "spec"]


@dataclass(frozen=True, slots=True, kw_only=True)
class OutputGatedSpec(SelfAttentionSpec):
    """Attention whose result is multiplied by a gate, which a projection of its own gives."""

    gate_name: str
    per_head: bool
    """The gate has one number for each head, not one for each of its dimensions."""
    built_by: ClassVar[str] = "quire_models.families.muse_glimmer_layers:OutputGatedAttention"

    def gate(self) -> LinearSpec:
        """From x to the gate."""
        outputs = self.num_heads * (1 if self.per_head else self.head_dim)
        return LinearSpec(name=self.gate_name, in_features=self.hidden_size, out_features=outputs)

    def weights(self) -> Iterator[Weight]:
        """Those of the attention, and the gate's."""
        yield from SelfAttentionSpec.weights(self)
        yield from inside(self.name, self.gate().weights("attention"))


def spec(config: Fields) -> NetworkSpec:
    """`layer_rope_theta` has the base of each layer's rotation, 0 for none."""
    named = config.named(hidden_act="hidden_activation")
    sizes = decoder_sizes(named, head_dim=128, eps=1e-5)
    num, rope = sizes.num_layers, sizes.rope
    assert rope is not None
    is_full = [(num - 1 - layer) % 4 == 0 for layer in sizes.layers]
    thetas = layer_thetas(config, [0 if each else rope.theta for each in is_full])
    windows = layer_windows(config.with_default("sliding_window", 2048), num, tuple(not each for each in is_full))
    norm = sizes.rms_norm("", sizes.head_dim, has_weight=False)
    attention = OutputGatedSpec(
        hidden_size=sizes.hidden_size,
        num_heads=sizes.num_heads,
        num_kv_heads=sizes.num_kv_heads,
        head_dim=sizes.head_dim,
        scale=sizes.head_dim**-0.5 * config.number("qk_scale_factor", default=3.87),
        rope=rope,
        rotary_dim=sizes.rotary_dim,
        qkv_bias=(bias := config.flag("attention_bias", default=False)),
        out_bias=bias,
        q_norm=norm,
        k_norm=norm,
        gate_name="gate_proj",
        per_head=False,
    )
    behind: dict[str, Any] = {"offset": 1.0, "eps": config.number("post_norm_eps", default=1e-8, minimum=0.0)}

    def before(name: str) -> NormSpec:
        return sizes.rms_norm(name, offset=1.0)

    layers = (
        LayerSpec(
            name=f"model.layers.{layer}",
            mixers=(
                replace(attention, sliding_window=window, rope=replace(rope, theta=float(theta)) if theta else None),
            ),
            feed_forward=sizes.gated_mlp(),
            input_norm=before("input_layernorm"),
            attention_out_norm=sizes.rms_norm("post_attention_layernorm", **behind),
            feed_forward_norm=before("pre_feedforward_layernorm"),
            feed_forward_out_norm=sizes.rms_norm("post_feedforward_layernorm", **behind),
        )
        for layer, (window, theta) in enumerate(zip(windows, thetas, strict=True))
    )
    cap = config.number("final_logit_softcapping", default=20.0, minimum=0.0)
    return sizes.network(
        layers,
        embedding=sizes.embedding(norm=sizes.rms_norm("", has_weight=False), norms_media=False),
        head=HeadSpec(
            tied=sizes.tied,
            factor=config.number("output_multiplier", default=0.19611613513818404),
            soft_cap=cap or None,
        ),
        checkpoint=CheckpointNames(renamed=(("model.language_model.", "model."),)),
    )

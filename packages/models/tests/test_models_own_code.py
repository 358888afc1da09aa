"""Networks of classes that came with code of their own: their logits beside a forward pass in float64."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from models_float64 import (
    VOCAB,
    Weights,
    attend,
    embed,
    expert_shapes,
    experts,
    gated,
    heads,
    largest_error,
    layer_norm_of,
    linear,
    rms,
    rotate,
)
from torch import Tensor

from quire_interfaces import CheckpointError
from quire_models import ModelConfig
from quire_models.registry import OWN_CODE

HIDDEN, INNER, HEADS, KV_HEADS, SIZE, LAYERS = 64, 96, 4, 2, 16, 2
Forward = Callable[[Weights, Tensor], Tensor]
LLAMA: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}


class Case(NamedTuple):
    """A checkpoint of a class, and what its logits are."""

    config: dict[str, Any]
    shapes: dict[str, tuple[int, ...]]
    forward: Forward


def of_layers(
    prefix: str, layer: dict[str, tuple[int, ...]], ends: dict[str, tuple[int, ...]]
) -> dict[str, tuple[int, ...]]:
    """Tensors of all layers, and of both ends."""
    return ends | {f"{prefix}.{n}.{name}": shape for n in range(LAYERS) for name, shape in layer.items()}


ENDS = {"model.embed_tokens.weight": (VOCAB, HIDDEN), "model.norm.weight": (HIDDEN,), "lm_head.weight": (VOCAB, HIDDEN)}
QKV = {
    "self_attn.q_proj.weight": (HEADS * SIZE, HIDDEN),
    "self_attn.k_proj.weight": (KV_HEADS * SIZE, HIDDEN),
    "self_attn.v_proj.weight": (KV_HEADS * SIZE, HIDDEN),
    "self_attn.o_proj.weight": (HIDDEN, HEADS * SIZE),
}
QKV_BIAS = {
    "self_attn.q_proj.bias": (HEADS * SIZE,),
    "self_attn.k_proj.bias": (KV_HEADS * SIZE,),
    "self_attn.v_proj.bias": (KV_HEADS * SIZE,),
}
MLP = {
    "mlp.gate_proj.weight": (INNER, HIDDEN),
    "mlp.up_proj.weight": (INNER, HIDDEN),
    "mlp.down_proj.weight": (HIDDEN, INNER),
}
NORMS = {"input_layernorm.weight": (HIDDEN,), "post_attention_layernorm.weight": (HIDDEN,)}
LAYER = QKV | MLP | NORMS


def llama(
    w: Weights,
    token_ids: Tensor,
    *,
    norm: Callable[[Weights, str, Tensor], Tensor] | None = None,
    ends: tuple[float, float, float] = (1.0, 1.0, 1.0),
) -> Tensor:
    """Llama's layers with other norms, or with factors of embedding, residuals and logits."""
    norm = norm or (lambda w, name, x: rms(x, w[f"{name}.weight"]))
    x = embed(w, "model.embed_tokens", token_ids) * ends[0]
    for n in range(LAYERS):
        at = f"model.layers.{n}"
        normed = norm(w, f"{at}.input_layernorm", x)
        q, k, v = (linear(w, f"{at}.self_attn.{part}_proj", normed) for part in "qkv")
        q, k, v = rotate(heads(q, HEADS)), rotate(heads(k, KV_HEADS)), heads(v, KV_HEADS)
        x = x + ends[1] * linear(w, f"{at}.self_attn.o_proj", attend(q, k, v))
        x = x + ends[1] * gated(w, f"{at}.mlp", norm(w, f"{at}.post_attention_layernorm", x))
    return linear(w, "lm_head", norm(w, "model.norm", x)) * ends[2]


def plain(**fields: Any) -> Case:
    return Case(LLAMA | fields, of_layers("model.layers", LAYER, ENDS), llama)


def with_biases(*names: str, **fields: Any) -> Case:
    """Llama with biases of these linear layers."""
    sizes = {name.removesuffix(".weight"): shape[:1] for name, shape in (QKV | MLP).items()}
    layer = LAYER | {f"{name}.bias": shape for name, shape in sizes.items() if name.rsplit(".", 1)[1] in names}
    return Case(LLAMA | fields, of_layers("model.layers", layer, ENDS), llama)


def orion() -> Case:
    shapes = of_layers("model.layers", LAYER, ENDS)
    shapes |= {name.replace("weight", "bias"): shape for name, shape in shapes.items() if "norm" in name}
    return Case(LLAMA | {"rms_norm_eps": 1e-5}, shapes, lambda w, ids: llama(w, ids, norm=layer_norm_of))


def minicpm() -> Case:
    ends = (12.0, 1.4 / LAYERS**0.5, 32 / HIDDEN)
    fields = {"scale_emb": 12, "scale_depth": 1.4, "dim_model_base": 32}
    return Case(LLAMA | fields, of_layers("model.layers", LAYER, ENDS), lambda w, ids: llama(w, ids, ends=ends))


def teleflm() -> Case:
    fields = {"use_mup": True, "mup_scale_factor": 4.0, "input_mult": 3.0, "output_mult": 2.0}
    shapes = of_layers("model.layers", LAYER, ENDS)
    return Case(LLAMA | fields, shapes, lambda w, ids: llama(w, ids, ends=(3.0, 1.0, 0.5)))


def exaone() -> Case:
    names = {
        "self_attn.o_proj": "attn.attention.out_proj",
        "self_attn.": "attn.attention.",
        "gate_proj": "c_fc_0",
        "up_proj": "c_fc_1",
        "down_proj": "c_proj",
        "input_layernorm": "ln_1",
        "post_attention_layernorm": "ln_2",
        "model.layers.": "transformer.h.",
        "model.embed_tokens": "transformer.wte",
        "model.norm": "transformer.ln_f",
    }

    def theirs(name: str) -> str:
        for old, new in names.items():
            name = name.replace(old, new)
        return name

    llamas = of_layers("model.layers", LAYER, ENDS)
    config = {name: value for name, value in LLAMA.items() if name not in ("num_hidden_layers", "rms_norm_eps")}
    config |= {"num_layers": LAYERS, "layer_norm_epsilon": 1e-6, "activation_function": "silu"}
    return Case(
        config,
        {theirs(name): shape for name, shape in llamas.items()},
        lambda w, ids: llama({name: w[theirs(name)] for name in llamas}, ids),
    )


def telechat2() -> Case:
    """Each head has a key and a value, which come head by head. Texts of up to 64 tokens rotate by the base of a factor
    alpha = 2^ceil(log2(64 / 16) + 1) - 1 = 7."""
    theta = 10000.0 * 7 ** (SIZE / (SIZE - 2))
    layer = (
        NORMS
        | MLP
        | {
            "self_attention.query.weight": (HIDDEN, HIDDEN),
            "self_attention.key_value.weight": (2 * HIDDEN, HIDDEN),
            "self_attention.dense.weight": (HIDDEN, HIDDEN),
            "self_attention.dense.bias": (HIDDEN,),
            "mlp.down_proj.bias": (HIDDEN,),
        }
    )
    ends = {"transformer.word_embeddings.weight": (VOCAB, HIDDEN), "transformer.ln_f.weight": (HIDDEN,)}

    def forward(w: Weights, token_ids: Tensor) -> Tensor:
        x = embed(w, "transformer.word_embeddings", token_ids)
        for n in range(LAYERS):
            at = f"transformer.h.{n}"
            normed = rms(x, w[f"{at}.input_layernorm.weight"], 1e-5)
            q = heads(linear(w, f"{at}.self_attention.query", normed), HEADS)
            k, v = heads(linear(w, f"{at}.self_attention.key_value", normed), HEADS).chunk(2, dim=-1)
            x = x + linear(w, f"{at}.self_attention.dense", attend(rotate(q, theta), rotate(k, theta), v))
            x = x + gated(w, f"{at}.mlp", rms(x, w[f"{at}.post_attention_layernorm.weight"], 1e-5))
        return linear(w, "lm_head", rms(x, w["transformer.ln_f.weight"], 1e-5))

    config = {
        "vocab_size": VOCAB, "hidden_size": HIDDEN, "n_layer": LAYERS, "n_head": HEADS, "ffn_hidden_size": INNER,
        "layer_norm_epsilon": 1e-5, "seq_length": 128, "base_seqlen": 16, "training_seqlen": 64,
        "embed_layernorm": False, "apply_residual_connection_post_layernorm": False, "tie_word_embeddings": False,
    }  # fmt: skip
    return Case(config, of_layers("transformer.h", layer, ends | {"lm_head.weight": (VOCAB, HIDDEN)}), forward)


def yi() -> Case:
    """Llama whose norms are called ln1 and ln2."""

    def theirs(name: str) -> str:
        return name.replace("input_layernorm", "ln1").replace("post_attention_layernorm", "ln2")

    llamas = of_layers("model.layers", LAYER, ENDS)
    shapes = {theirs(name): shape for name, shape in llamas.items()}
    return Case(LLAMA, shapes, lambda w, ids: llama({name: w[theirs(name)] for name in llamas}, ids))


def first_llama() -> Case:
    """Llama whose context is called `max_sequence_length`."""
    fields = {name: value for name, value in LLAMA.items() if name != "max_position_embeddings"}
    return Case(fields | {"max_sequence_length": 64}, of_layers("model.layers", LAYER, ENDS), llama)


def chatglm() -> Case:
    width = (HEADS + 2 * KV_HEADS) * SIZE
    layer = NORMS | {
        "self_attention.query_key_value.weight": (width, HIDDEN),
        "self_attention.query_key_value.bias": (width,),
        "self_attention.dense.weight": (HIDDEN, HIDDEN),
        "mlp.dense_h_to_4h.weight": (2 * INNER, HIDDEN),
        "mlp.dense_4h_to_h.weight": (HIDDEN, INNER),
    }
    ends = {
        "transformer.embedding.word_embeddings.weight": (VOCAB, HIDDEN),
        "transformer.encoder.final_layernorm.weight": (HIDDEN,),
        "transformer.output_layer.weight": (VOCAB, HIDDEN),
        "transformer.rotary_pos_emb.inv_freq": (SIZE // 4,),
    }

    def forward(w: Weights, token_ids: Tensor) -> Tensor:
        x = embed(w, "transformer.embedding.word_embeddings", token_ids)
        for n in range(LAYERS):
            at = f"transformer.encoder.layers.{n}"
            normed = rms(x, w[f"{at}.input_layernorm.weight"], 1e-5)
            qkv = heads(linear(w, f"{at}.self_attention.query_key_value", normed), HEADS + 2 * KV_HEADS)
            q, k, v = qkv.split((HEADS, KV_HEADS, KV_HEADS), dim=1)
            q, k = (rotate(each, 20000.0, SIZE // 2, interleaved=True) for each in (q, k))
            x = x + linear(w, f"{at}.self_attention.dense", attend(q, k, v))
            up = linear(w, f"{at}.mlp.dense_h_to_4h", rms(x, w[f"{at}.post_attention_layernorm.weight"], 1e-5))
            x = x + linear(w, f"{at}.mlp.dense_4h_to_h", torch.nn.functional.silu(up[:, :INNER]) * up[:, INNER:])
        return linear(w, "transformer.output_layer", rms(x, w["transformer.encoder.final_layernorm.weight"], 1e-5))

    config = {
        "padded_vocab_size": VOCAB, "hidden_size": HIDDEN, "num_layers": LAYERS, "num_attention_heads": HEADS,
        "kv_channels": SIZE, "ffn_hidden_size": INNER, "multi_query_attention": True, "multi_query_group_num": KV_HEADS,
        "seq_length": 64, "layernorm_epsilon": 1e-5, "rmsnorm": True, "add_qkv_bias": True, "add_bias_linear": False,
        "rope_ratio": 2, "original_rope": True, "post_layer_norm": True, "tie_word_embeddings": False,
        "apply_residual_connection_post_layernorm": False,
    }  # fmt: skip
    return Case(config, of_layers("transformer.encoder.layers", layer, ends), forward)


def decilm() -> Case:
    """The first layer has attention alone, with one key-value head; the second an MLP of its own width."""
    first = {name: (SIZE if name[10] in "kv" else HIDDEN, HIDDEN) for name in QKV}
    shapes = ENDS | {f"model.layers.0.{name}": shape for name, shape in first.items()}
    shapes |= {f"model.layers.1.{name}": tuple(256 if n == INNER else n for n in size) for name, size in MLP.items()}
    shapes |= {"model.layers.0.input_layernorm.weight": (HIDDEN,)}
    shapes |= {"model.layers.1.post_attention_layernorm.weight": (HIDDEN,)}

    def forward(w: Weights, token_ids: Tensor) -> Tensor:
        x = embed(w, "model.embed_tokens", token_ids)
        normed, at = rms(x, w["model.layers.0.input_layernorm.weight"]), "model.layers.0.self_attn"
        q, k, v = (heads(linear(w, f"{at}.{part}_proj", normed), 4 if part == "q" else 1) for part in "qkv")
        x = x + linear(w, f"{at}.o_proj", attend(rotate(q), rotate(k), v))
        x = x + gated(w, "model.layers.1.mlp", rms(x, w["model.layers.1.post_attention_layernorm.weight"]))
        return linear(w, "lm_head", rms(x, w["model.norm.weight"]))

    blocks = [
        {"attention": {"n_heads_in_group": 4, "no_op": False}, "ffn": {"no_op": True, "ffn_mult": None}},
        {"attention": {"n_heads_in_group": None, "no_op": True}, "ffn": {"ffn_mult": 3.0, "no_op": False}},
    ]
    config = {name: value for name, value in LLAMA.items() if name not in ("num_key_value_heads", "intermediate_size")}
    return Case(config | {"block_configs": blocks}, shapes, forward)


def decilm_7b() -> dict[str, Any]:
    """config.json of layers that differ in their key-value heads alone."""
    fields = {name: value for name, value in LLAMA.items() if name != "num_key_value_heads"}
    return fields | {"architectures": ["DeciLMForCausalLM"], "num_key_value_heads_per_layer": [4, 1]}


def soft(logits: Tensor) -> Tensor:
    return torch.softmax(logits, dim=-1)


def deepseek() -> Case:
    """The first layer has no experts."""
    shapes = of_layers("model.layers", QKV | NORMS, ENDS)
    shapes |= {f"model.layers.0.{name}": shape for name, shape in MLP.items()}
    shapes |= {f"model.layers.1.{name}": shape for name, shape in expert_shapes(HIDDEN, 6, 24, 48).items()}

    def forward(w: Weights, token_ids: Tensor) -> Tensor:
        x = embed(w, "model.embed_tokens", token_ids)
        for n in range(LAYERS):
            at = f"model.layers.{n}"
            normed = rms(x, w[f"{at}.input_layernorm.weight"])
            q, k, v = (
                heads(linear(w, f"{at}.self_attn.{part}_proj", normed), HEADS if part == "q" else KV_HEADS)
                for part in "qkv"
            )
            x = x + linear(w, f"{at}.self_attn.o_proj", attend(rotate(q), rotate(k), v))
            normed = rms(x, w[f"{at}.post_attention_layernorm.weight"])
            if n == 0:
                x = x + gated(w, f"{at}.mlp", normed)
                continue
            x = x + gated(w, f"{at}.mlp.shared_experts", normed)
            x = x + experts(w, f"{at}.mlp", normed, num=6, top_k=2, score=soft, renormalize=False)
        return linear(w, "lm_head", rms(x, w["model.norm.weight"]))

    fields = {
        "n_routed_experts": 6, "n_shared_experts": 2, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
        "first_k_dense_replace": 1, "moe_layer_freq": 1, "norm_topk_prob": False, "scoring_func": "softmax",
    }  # fmt: skip
    return Case(LLAMA | fields, shapes, forward)


def bailing(*, version: int, shared: int = 24) -> Case:
    """The first: softmax over all experts. The second: sigmoids, groups, a bias, normalised heads that are rotated by
    half, a layer for further tokens behind the last one; which of these are what its class has is not said.

    Args:
        shared: `moe_shared_expert_intermediate_size`, of one shared expert or of both.
    """
    width, is_second = (HEADS + 2 * KV_HEADS) * SIZE, version == 2
    layer = NORMS | {"attention.query_key_value.weight": (width, HIDDEN), "attention.dense.weight": (HIDDEN, HIDDEN)}
    if is_second:
        layer |= {"attention.query_layernorm.weight": (SIZE,), "attention.key_layernorm.weight": (SIZE,)}
    ends = {"model.word_embeddings.weight": (VOCAB, HIDDEN), **{k: v for k, v in ENDS.items() if "embed" not in k}}
    shapes = of_layers("model.layers", layer, ends)
    shapes |= {f"model.layers.0.{name}": shape for name, shape in MLP.items()}
    shapes |= {f"model.layers.1.{name}": shape for name, shape in expert_shapes(HIDDEN, 8, 24, 24 * version).items()}
    if is_second:
        shapes |= {"model.layers.1.mlp.gate.expert_bias": (8,), f"model.layers.{LAYERS}.eh_proj.weight": (4, 4)}

    def forward(w: Weights, token_ids: Tensor) -> Tensor:
        x = embed(w, "model.word_embeddings", token_ids)
        for n in range(LAYERS):
            at = f"model.layers.{n}"
            normed = rms(x, w[f"{at}.input_layernorm.weight"])
            qkv = heads(linear(w, f"{at}.attention.query_key_value", normed), HEADS + 2 * KV_HEADS)
            q, k, v = qkv.split((HEADS, KV_HEADS, KV_HEADS), dim=1)
            if is_second:
                q, k = (
                    rms(q, w[f"{at}.attention.query_layernorm.weight"]),
                    rms(k, w[f"{at}.attention.key_layernorm.weight"]),
                )
            q, k = (rotate(each, 10000.0, SIZE // version) for each in (q, k))
            x = x + linear(w, f"{at}.attention.dense", attend(q, k, v))
            normed = rms(x, w[f"{at}.post_attention_layernorm.weight"])
            if n == 0:
                x = x + gated(w, f"{at}.mlp", normed)
                continue
            routed = experts(
                w, f"{at}.mlp", normed, num=8, top_k=3, renormalize=True, score=torch.sigmoid if is_second else soft,
                bias=f"{at}.mlp.gate.expert_bias" if is_second else "", groups=(4, 2) if is_second else (1, 1),
                factor=2.5 if is_second else 1.0,
            )  # fmt: skip
            x = x + routed + gated(w, f"{at}.mlp.shared_experts", normed)
        return linear(w, "lm_head", rms(x, w["model.norm.weight"]))

    fields: dict[str, Any] = {
        "num_experts": 8, "num_shared_experts": version, "num_experts_per_tok": 3, "moe_intermediate_size": 24,
        "first_k_dense_replace": 1, "norm_topk_prob": True, "use_bias": False, "use_qkv_bias": False, "head_dim": SIZE,
        "norm_head": False, "norm_softmax": False,
    }  # fmt: skip
    if is_second:
        fields |= {
            "n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5, "partial_rotary_factor": 0.5,
            "num_nextn_predict_layers": 1, "moe_shared_expert_intermediate_size": shared,
        }  # fmt: skip
    return Case(LLAMA | fields, shapes, forward)


def yarn(x: Tensor, theta: float, factor: float, original: int) -> Tensor:
    """Positions of [T, H, D] rotated by YaRN (Peng et al. 2023, sec. 3), with a ramp between pairs that turn 32 times
    and once in the original context, in parts of a pair."""
    size = x.shape[-1]
    plain = theta ** (-torch.arange(0, size, 2, dtype=torch.float64) / size)
    low, high = (size * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta)) for turns in (32, 1))
    low, high = max(low, 0.0), min(high, size - 1.0)
    ramp = ((torch.arange(size // 2, dtype=torch.float64) - low) / (high - low)).clamp(0, 1)
    angles = torch.outer(torch.arange(len(x), dtype=torch.float64), plain * (1 - ramp) + plain / factor * ramp)
    scale = 0.1 * math.log(factor) + 1
    cos, sin = scale * angles.cos()[:, None], scale * angles.sin()[:, None]
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


def plamo3() -> Case:
    """The first layer has a window and a base of its own; the second rotates by YaRN. Both ends share the embedding."""
    layer = {
        "mixer.qkv_proj.weight": ((HEADS + 2 * KV_HEADS) * SIZE, HIDDEN),
        "mixer.o_proj.weight": (HIDDEN, HEADS * SIZE),
        "mixer.q_norm.weight": (SIZE,),
        "mixer.k_norm.weight": (SIZE,),
        "mlp.gate_up_proj.weight": (2 * INNER, HIDDEN),
        "mlp.down_proj.weight": (HIDDEN, INNER),
        **{f"{name}_norm.weight": (HIDDEN,) for name in ("pre_mixer", "post_mixer", "pre_mlp", "post_mlp")},
    }

    def forward(w: Weights, token_ids: Tensor) -> Tensor:
        x = embed(w, "model.embed_tokens", token_ids)
        for n in range(LAYERS):
            at = f"model.layers.layers.{n}"
            qkv = linear(w, f"{at}.mixer.qkv_proj", rms(x, w[f"{at}.pre_mixer_norm.weight"], offset=1.0))
            q, k, v = heads(qkv, HEADS + 2 * KV_HEADS).split((HEADS, KV_HEADS, KV_HEADS), dim=1)
            q = rms(q, w[f"{at}.mixer.q_norm.weight"], offset=1.0)
            k = rms(k, w[f"{at}.mixer.k_norm.weight"], offset=1.0)
            if n == 0:
                mixed = attend(rotate(q), rotate(k), v, window=6)
            else:
                mixed = attend(*(yarn(each, 1e6, 2.0, 64) for each in (q, k)), v)
            mixed = linear(w, f"{at}.mixer.o_proj", mixed)
            x = x + rms(mixed, w[f"{at}.post_mixer_norm.weight"], offset=0.2)
            up = linear(w, f"{at}.mlp.gate_up_proj", rms(x, w[f"{at}.pre_mlp_norm.weight"], offset=1.0))
            down = linear(w, f"{at}.mlp.down_proj", torch.nn.functional.silu(up[:, :INNER]) * up[:, INNER:])
            x = x + rms(down, w[f"{at}.post_mlp_norm.weight"], offset=5**-1.5)
        return linear(w, "model.embed_tokens", rms(x, w["model.norm.weight"], offset=1.0))

    fields = {
        "head_dim": SIZE, "window_size": 2048, "sliding_window_pattern": 8, "interleaved_sliding_window": [6, None],
        "rope_theta": 1000000, "rope_local_theta": 10000, "rope_scaling_factor": 2.0, "initial_context_length": 64,
        "max_position_embeddings": 128, "hidden_activation": "swiglu", "attention_bias": False,
    }  # fmt: skip
    config = {name: value for name, value in (LLAMA | fields).items() if name != "tie_word_embeddings"}
    ends = {name: shape for name, shape in ENDS.items() if "lm_head" not in name}
    return Case(config, of_layers("model.layers.layers", layer, ends), forward)


CASES: dict[str, Callable[[], Case]] = {
    **dict.fromkeys(
        (
            "AquilaForCausalLM", "AquilaModel", "IQuestCoderForCausalLM", "TeleChat3ForCausalLM", "XverseForCausalLM",
        ),
        plain,
    ),
    "BailingMoeForCausalLM": lambda: bailing(version=1),
    **dict.fromkeys(("BailingMoeV2ForCausalLM", "SarvamMoEForCausalLM"), lambda: bailing(version=2)),
    **dict.fromkeys(("ChatGLMForConditionalGeneration", "ChatGLMModel"), chatglm),
    "DeciLMForCausalLM": decilm,
    "DeepseekForCausalLM": deepseek,
    "ExaoneForCausalLM": exaone,
    "InternLM3ForCausalLM": lambda: with_biases(*(f"{part}_proj" for part in "qkv"), qkv_bias=True, bias=False),
    "InternLMForCausalLM": lambda: with_biases(*(f"{part}_proj" for part in "qkvo"), bias=True),
    "LLaMAForCausalLM": first_llama,
    "MiMoForCausalLM": lambda: with_biases(*(f"{part}_proj" for part in "qkv")),
    "MiniCPMForCausalLM": minicpm,
    "OrionForCausalLM": orion,
    "PanguEmbeddedForCausalLM": lambda: with_biases(*(f"{part}_proj" for part in "qkvo"), bias=True),
    "Param2MoEForCausalLM": lambda: bailing(version=2, shared=48),
    "Plamo3ForCausalLM": plamo3,
    **dict.fromkeys(("TeleChat2ForCausalLM", "TeleChatForCausalLM", "TelechatForCausalLM"), telechat2),
    "TeleFLMForCausalLM": teleflm,
    "YiForCausalLM": yi,
}  # fmt: skip
"""Architecture -> its case; of those that are the same network, the first is computed."""

ELSEWHERE = {
    "BailingMoeV2_5ForCausalLM", "Glm5NextForCausalLM", "GritLM", "InternLM2ForCausalLM", "InternLM2ForRewardModel",
    "PanguProMoEV2ForCausalLM", "PanguUltraMoEForCausalLM", "SarvamMLAForCausalLM",
    "Step3TextForCausalLM", "DomynEdgeForCausalLM", "NemotronHPuzzleForCausalLM", "HCXVisionV2ForCausalLM",
    "IQuestLoopCoderForCausalLM", "MiMoV2ForCausalLM", "MuseGlimmerForCausalLM", "SolarForCausalLM",
    "LongcatFlashNgramForCausalLM", "MistralLarge3ForCausalLM",
    "Step1ForCausalLM", "Step3p5ForCausalLM", "Grok1ForCausalLM", "Grok1ModelForCausalLM",
}  # fmt: skip
"""Held to Transformers' Mistral and Llama in test_models_pooling_decoders.py and test_models_bidirectional.py, to its
Mistral 4 in test_models_mistral_format.py, or to float64 in test_models_own_attention.py, test_models_own_layers.py and
test_models_grok.py, or to Transformers' LongCat-Flash in test_models_longcat.py."""


def first_of_each() -> list[str]:
    """One architecture for each network."""
    return list({make: name for name, make in reversed(CASES.items())}.values())


@pytest.mark.parametrize("architecture", first_of_each())
def test_logits_are_those_of_a_forward_pass_in_float64(architecture: str, tmp_path: Path) -> None:
    config, shapes, forward = CASES[architecture]()
    assert largest_error(tmp_path, {"architectures": [architecture], **config}, shapes, forward) < 1e-5


def test_architectures_of_one_network_are_described_alike() -> None:
    networks: dict[Callable[[], Case], Any] = {}
    for architecture, make in CASES.items():
        network = ModelConfig.from_dict({"architectures": [architecture], **make().config}).network
        assert networks.setdefault(make, network) == network
    assert CASES.keys() | ELSEWHERE == OWN_CODE.keys()


def network_of(architecture: str, **fields: Any) -> Any:
    """The network of a case with other fields; None takes one away."""
    return ModelConfig.from_dict({"architectures": [architecture], **CASES[architecture]().config, **fields}).network


def test_what_a_class_has_can_be_said_too() -> None:
    said = {"score_function": "sigmoid", "moe_router_enable_expert_bias": True, "use_qk_norm": True}
    for architecture in ("BailingMoeV2ForCausalLM", "Param2MoEForCausalLM", "SarvamMoEForCausalLM"):
        assert network_of(architecture, **said) == network_of(architecture)
    by_pattern = {"interleaved_sliding_window": None, "window_size": 6, "sliding_window_pattern": 2}
    assert network_of("Plamo3ForCausalLM", **by_pattern) == network_of("Plamo3ForCausalLM")


def test_texts_are_no_longer_than_what_keeps_its_rotation() -> None:
    network = network_of("TeleChatForCausalLM")
    assert network.max_model_len == 64
    assert "training_seqlen (64)" in network.notes[0]
    shorter = network_of("TeleChatForCausalLM", seq_length=32)
    assert (shorter.max_model_len, shorter.notes) == (32, ())
    assert network_of("Plamo3ForCausalLM").max_model_len == 128


def test_attention_that_is_not_sparse_is_noted() -> None:
    sparse = {"kernel_size": 32, "topk": 64, "dense_len": 8192}
    (note,) = network_of("MiniCPMForCausalLM", sparse_config=sparse).notes
    assert "sparse_config" in note
    assert "dense_len (8192)" in note
    assert network_of("MiniCPMForCausalLM").notes == ()


def test_layers_of_a_decilm_have_their_key_value_heads() -> None:
    network = ModelConfig.from_dict(decilm_7b()).network
    layers = [network_of("XverseForCausalLM", num_key_value_heads=number).layers for number in (4, 1)]
    assert network.layers == (layers[0][0], layers[1][1])
    for wrong in ([4], [4, 3], [4, "1"]):
        with pytest.raises(CheckpointError, match="num_key_value_heads_per_layer must have"):
            ModelConfig.from_dict({**decilm_7b(), "num_key_value_heads_per_layer": wrong})


@pytest.mark.parametrize(
    ("sink", "words"),
    [
        ({"num_sink_tokens": 4}, "num_sink_tokens 4 is not supported"),
        ({"unshifted_sink": True}, "unshifted_sink True is not supported"),
    ],
)
def test_sinks_in_front_of_a_window_are_refused(sink: dict[str, Any], words: str) -> None:
    blocks = CASES["DeciLMForCausalLM"]().config["block_configs"]
    attention = {**blocks[0]["attention"], "window_length": 6}
    assert network_of("DeciLMForCausalLM", block_configs=[{**blocks[0], "attention": attention}, blocks[1]])
    with pytest.raises(CheckpointError, match=words):
        network_of("DeciLMForCausalLM", block_configs=[{**blocks[0], "attention": attention | sink}, blocks[1]])


@pytest.mark.parametrize(
    ("architecture", "fields", "words"),
    [
        ("TeleChat2ForCausalLM", {"embed_layernorm": True}, "embed_layernorm True is not supported"),
        (
            "TeleChatForCausalLM",
            {"apply_residual_connection_post_layernorm": True},
            "apply_residual_connection_post_layernorm True is not supported",
        ),
        ("Plamo3ForCausalLM", {"interleaved_sliding_window": [6]}, "interleaved_sliding_window must have a number"),
        ("Plamo3ForCausalLM", {"interleaved_sliding_window": [0, None]}, "interleaved_sliding_window must have"),
        ("Plamo3ForCausalLM", {"initial_context_length": None}, "initial_context_length is missing"),
        ("DeciLMForCausalLM", {"block_configs": []}, "block_configs must describe each of 2 layers"),
        ("BailingMoeForCausalLM", {"norm_head": True}, "norm_head True is not supported"),
        ("ChatGLMModel", {"rmsnorm": False}, "rmsnorm False is not supported"),
    ],
)
def test_what_is_not_computed_is_refused_by_name(architecture: str, fields: dict[str, Any], words: str) -> None:
    with pytest.raises(CheckpointError, match=words):
        network_of(architecture, **fields)

"""Networks of classes that came with code of their own, and with attention other than Llama's: their logits beside a
forward pass in float64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

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
    linear,
    rms,
    rotate,
)
from torch import Tensor
from torch.nn.functional import silu

from quire_interfaces import CheckpointError
from quire_models import ModelConfig
from quire_testkit.parity.cases import CASES as CASES_OF_CLASSES

HIDDEN, INNER, HEADS, LAYERS = 64, 96, 4, 2
RANK, NOPE, ROPE, VALUE = 16, 12, 8, 20
Case = tuple[dict[str, Any], dict[str, tuple[int, ...]], Callable[[Weights, Tensor], Tensor]]
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": HIDDEN, "intermediate_size": INNER, "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS, "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "tie_word_embeddings": False,
}  # fmt: skip
LATENT: dict[str, Any] = SIZES | {
    "num_key_value_heads": HEADS, "max_position_embeddings": 64, "kv_lora_rank": RANK, "qk_nope_head_dim": NOPE,
    "qk_rope_head_dim": ROPE, "v_head_dim": VALUE, "num_experts_per_tok": 3, "moe_intermediate_size": 24,
    "first_k_dense_replace": 1, "norm_topk_prob": True, "routed_scaling_factor": 2.5,
}  # fmt: skip
ENDS = {"model.embed_tokens.weight": (VOCAB, HIDDEN), "model.norm.weight": (HIDDEN,), "lm_head.weight": (VOCAB, HIDDEN)}
MLP = {
    "mlp.gate_proj.weight": (INNER, HIDDEN),
    "mlp.up_proj.weight": (INNER, HIDDEN),
    "mlp.down_proj.weight": (HIDDEN, INNER),
}
LATENT_ATTENTION = {
    "self_attn.kv_a_proj_with_mqa.weight": (RANK + ROPE, HIDDEN),
    "self_attn.kv_a_layernorm.weight": (RANK,),
    "self_attn.kv_b_proj.weight": (HEADS * (NOPE + VALUE), RANK),
    "self_attn.o_proj.weight": (HIDDEN, HEADS * VALUE),
}


def latent_attention(w: Weights, at: str, x: Tensor) -> Tensor:
    """DeepSeek-V2, sec. 2.1, with keys and values made of the latents."""
    if f"{at}.q_proj.weight" in w:
        query = linear(w, f"{at}.q_proj", x)
    else:
        query = linear(w, f"{at}.q_b_proj", rms(linear(w, f"{at}.q_a_proj", x), w[f"{at}.q_a_layernorm.weight"]))
    q_nope, q_rope = heads(query, HEADS).split((NOPE, ROPE), dim=-1)
    latent, k_rope = linear(w, f"{at}.kv_a_proj_with_mqa", x).split((RANK, ROPE), dim=-1)
    pairs = heads(linear(w, f"{at}.kv_b_proj", rms(latent, w[f"{at}.kv_a_layernorm.weight"])), HEADS)
    k_nope, v = pairs.split((NOPE, VALUE), dim=-1)
    q = torch.cat((q_nope, rotate(q_rope, interleaved=True)), dim=-1)
    k = torch.cat((k_nope, rotate(k_rope[:, None], interleaved=True).expand(-1, HEADS, -1)), dim=-1)
    return linear(w, f"{at}.o_proj", attend(q, k, v))


def sarvam() -> Case:
    layer = LATENT_ATTENTION | {
        "self_attn.q_proj.weight": (HEADS * (NOPE + ROPE), HIDDEN),
        "input_layernorm.weight": (HIDDEN,),
        "post_attention_layernorm.weight": (HIDDEN,),
    }
    sparse = expert_shapes(HIDDEN, 8, 24, 24) | {"mlp.gate.e_score_correction_bias": (8,)}
    shapes = ENDS | {
        f"model.layers.{n}.{name}": s for n, part in enumerate((MLP, sparse)) for name, s in (layer | part).items()
    }

    def forward(w: Weights, token_ids: Tensor) -> Tensor:
        x = embed(w, "model.embed_tokens", token_ids)
        for n in range(LAYERS):
            at = f"model.layers.{n}"
            x = x + latent_attention(w, f"{at}.self_attn", rms(x, w[f"{at}.input_layernorm.weight"]))
            normed = rms(x, w[f"{at}.post_attention_layernorm.weight"])
            if n == 0:
                x = x + gated(w, f"{at}.mlp", normed)
                continue
            x = x + gated(w, f"{at}.mlp.shared_experts", normed) + experts(
                w, f"{at}.mlp", normed, num=8, top_k=3, score=torch.sigmoid, renormalize=True, factor=2.5,
                bias=f"{at}.mlp.gate.e_score_correction_bias",
            )  # fmt: skip
        return linear(w, "lm_head", rms(x, w["model.norm.weight"]))

    return LATENT | {"num_experts": 8, "num_shared_experts": 1}, shapes, forward


def pangu_ultra() -> Case:
    """Queries have a latent, too; norms stand behind the parts as well."""
    norms = ("input_layernorm", "post_attention_layernorm", "pre_mlp_layernorm", "post_mlp_layernorm")
    layer = LATENT_ATTENTION | {
        "self_attn.q_a_proj.weight": (24, HIDDEN),
        "self_attn.q_a_layernorm.weight": (24,),
        "self_attn.q_b_proj.weight": (HEADS * (NOPE + ROPE), 24),
        **{f"{name}.weight": (HIDDEN,) for name in norms},
    }
    sparse = expert_shapes(HIDDEN, 8, 24, 24)
    shapes = ENDS | {
        f"model.layers.{n}.{name}": s for n, part in enumerate((MLP, sparse)) for name, s in (layer | part).items()
    }

    def forward(w: Weights, token_ids: Tensor) -> Tensor:
        x = embed(w, "model.embed_tokens", token_ids)
        for n in range(LAYERS):
            at = f"model.layers.{n}"
            first, behind, second, last = (w[f"{at}.{name}.weight"] for name in norms)
            x = x + rms(latent_attention(w, f"{at}.self_attn", rms(x, first)), behind)
            normed = rms(x, second)
            if n == 0:
                out = gated(w, f"{at}.mlp", normed)
            else:
                out = gated(w, f"{at}.mlp.shared_experts", normed) + experts(
                    w, f"{at}.mlp", normed, num=8, top_k=3, score=torch.sigmoid, renormalize=True, factor=2.5
                )
            x = x + rms(out, last)
        return linear(w, "lm_head", rms(x, w["model.norm.weight"]))

    fields = {"n_routed_experts": 8, "n_shared_experts": 1, "q_lora_rank": 24, "sandwich_norm": True}
    return LATENT | fields, shapes, forward


def pangu_first_named() -> Case:
    """The same with the fields as they were called first."""
    first = {
        "kv_lora_rank": "attention_kv_lora_dim", "q_lora_rank": "attention_q_lora_dim",
        "qk_nope_head_dim": "attention_qk_dim", "qk_rope_head_dim": "attention_qk_rope_dim",
        "v_head_dim": "attention_v_dim", "n_routed_experts": "num_routed_experts",
        "n_shared_experts": "num_shared_experts", "first_k_dense_replace": "num_dense_layers",
        "num_nextn_predict_layers": "num_mtp_layers",
    }  # fmt: skip
    config, shapes, forward = pangu_ultra()
    config = {first.get(name, name): value for name, value in (config | {"num_nextn_predict_layers": 1}).items()}
    return config, shapes | {f"model.layers.{LAYERS}.eh_proj.weight": (4, 4)}, forward


def step3() -> Case:
    """Queries of 24 numbers, normalised, make four heads over one key and one value head."""
    layer = {
        "self_attn.q_proj.weight": (24, HIDDEN),
        "self_attn.inter_norm.weight": (24,),
        "self_attn.wq.weight": (HEADS * 16, 24),
        "self_attn.k_proj.weight": (16, HIDDEN),
        "self_attn.v_proj.weight": (16, HIDDEN),
        "self_attn.o_proj.weight": (HIDDEN, HEADS * 16),
        "input_layernorm.weight": (HIDDEN,),
        "post_attention_layernorm.weight": (HIDDEN,),
    }
    sparse = {
        "moe.gate.weight": (6, HIDDEN),
        **{f"moe.{name}.weight": (6, 24, HIDDEN) for name in ("gate_proj", "up_proj")},
        "moe.down_proj.weight": (6, HIDDEN, 24),
        **{f"share_expert.{name}.weight": (40, HIDDEN) for name in ("gate_proj", "up_proj")},
        "share_expert.down_proj.weight": (HIDDEN, 40),
    }
    shapes = ENDS | {
        f"model.layers.{n}.{name}": s for n, part in enumerate((MLP, sparse)) for name, s in (layer | part).items()
    }

    def forward(w: Weights, token_ids: Tensor) -> Tensor:
        x = embed(w, "model.embed_tokens", token_ids)
        for n in range(LAYERS):
            at = f"model.layers.{n}"
            normed = rms(x, w[f"{at}.input_layernorm.weight"])
            latent = rms(linear(w, f"{at}.self_attn.q_proj", normed), w[f"{at}.self_attn.inter_norm.weight"])
            q = heads(linear(w, f"{at}.self_attn.wq", latent), HEADS)
            k, v = (heads(linear(w, f"{at}.self_attn.{part}_proj", normed), 1) for part in "kv")
            x = x + linear(w, f"{at}.self_attn.o_proj", attend(rotate(q), rotate(k), v))
            normed = rms(x, w[f"{at}.post_attention_layernorm.weight"])
            if n == 0:
                x = x + gated(w, f"{at}.mlp", normed)
                continue
            by_expert = {"moe.gate.weight": w[f"{at}.moe.gate.weight"]} | {
                f"moe.experts.{expert}.{name}.weight": w[f"{at}.moe.{name}.weight"][expert]
                for expert in range(6)
                for name in ("gate_proj", "up_proj", "down_proj")
            }
            routed = experts(
                by_expert,
                "moe",
                normed,
                num=6,
                top_k=2,
                score=lambda logits: torch.softmax(logits, -1),
                renormalize=True,
            )
            x = x + routed + gated(w, f"{at}.share_expert", normed)
        return linear(w, "lm_head", rms(x, w["model.norm.weight"]))

    fields = {
        "head_dim": 16, "share_q_dim": 24, "max_position_embedding": 64, "moe_num_experts": 6, "moe_top_k": 2,
        "moe_intermediate_size": 24, "share_expert_dim": 40, "norm_expert_weight": True, "moe_layers_enum": "1",
    }  # fmt: skip
    return SIZES | fields, shapes, forward


def domyn_edge() -> Case:
    """Heads of 16 numbers, rotated, in a window of six tokens; then of 24, without positions."""
    norms = ("pre_attention_norm", "post_attention_norm", "pre_feedforward_norm", "post_feedforward_norm")
    shapes = dict(ENDS)
    for n, size in enumerate((16, 24)):
        layer = {
            "attention.q_proj.weight": (HEADS * size, HIDDEN),
            **{f"attention.{part}_proj.weight": (2 * size, HIDDEN) for part in "kv"},
            "attention.o_proj.weight": (HIDDEN, HEADS * size),
            "attention.k_norm.weight": (size,),
            **{name.replace("mlp", "feedforward"): shape for name, shape in MLP.items()},
            **{f"{name}.weight": (HIDDEN,) for name in norms},
        }
        shapes |= {f"model.layers.{n}.{name}": shape for name, shape in layer.items()}

    def forward(w: Weights, token_ids: Tensor) -> Tensor:
        x = embed(w, "model.embed_tokens", token_ids)
        for n in range(LAYERS):
            at = f"model.layers.{n}"
            first, behind, second, last = (w[f"{at}.{name}.weight"] for name in norms)
            normed = rms(x, first)
            q, k, v = (
                heads(linear(w, f"{at}.attention.{part}_proj", normed), HEADS if part == "q" else 2) for part in "qkv"
            )
            q, k = rms(q), rms(k, w[f"{at}.attention.k_norm.weight"])
            attended = attend(rotate(q), rotate(k), v, window=6) if n == 0 else attend(q, k, v)
            x = x + rms(linear(w, f"{at}.attention.o_proj", attended), behind)
            x = x + rms(gated(w, f"{at}.feedforward", rms(x, second)), last)
        return linear(w, "lm_head", rms(x, w["model.norm.weight"]))

    fields = {
        "num_key_value_heads": 2, "max_position_embeddings": 64, "window_sizes": [[5, 0], [-1, -1]],
        "position_layers": ["rope", "nope"], "per_layer_config": {"1": {"head_dim": 24}},
    }  # fmt: skip
    return SIZES | fields, shapes, forward


def pangu_pro() -> Case:
    """Two key-value heads; three learned keys, which are normalised as others and not rotated."""
    size, narrow, kv_heads = NOPE + ROPE, 16, 2
    layer = {
        "self_attn.q_proj.weight": (HEADS * size, HIDDEN), "self_attn.k_proj.weight": (kv_heads * size, HIDDEN),
        "self_attn.v_proj.weight": (kv_heads * narrow, HIDDEN), "self_attn.o_proj.weight": (HIDDEN, HEADS * narrow),
        "self_attn.k_layernorm.weight": (size,), "self_attn.param_sink_key": (3, kv_heads, size),
        "self_attn.param_sink_value": (3, kv_heads, narrow), "input_layernorm.weight": (HIDDEN,),
        "post_attention_layernorm.weight": (HIDDEN,),
    }  # fmt: skip
    parts = (MLP, expert_shapes(HIDDEN, 8, 24, 24) | {"mlp.gate.e_score_correction_bias": (8,)})
    shapes = ENDS | {
        f"model.layers.{n}.{name}": s for n, part in enumerate(parts) for name, s in (layer | part).items()
    }

    def attention(w: Weights, at: str, x: Tensor) -> Tensor:
        q, k, v = (heads(linear(w, f"{at}.{part}_proj", x), num) for part, num in (("q", HEADS), ("k", 2), ("v", 2)))
        norm = w[f"{at}.k_layernorm.weight"]
        q, k = rotate(q, dims=ROPE, interleaved=True), rotate(rms(k, norm), dims=ROPE, interleaved=True)
        k = torch.cat((rms(w[f"{at}.param_sink_key"], norm), k)).repeat_interleave(2, dim=1)
        v = torch.cat((w[f"{at}.param_sink_value"], v)).repeat_interleave(2, dim=1)
        scores = torch.einsum("ihd,jhd->hij", q, k) * size**-0.5
        later = torch.arange(len(k)) > torch.arange(len(q))[:, None] + 3
        weights = scores.masked_fill(later, -torch.inf).softmax(dim=-1)
        return linear(w, f"{at}.o_proj", torch.einsum("hij,jhd->ihd", weights, v).flatten(1))

    def forward(w: Weights, token_ids: Tensor) -> Tensor:
        x = embed(w, "model.embed_tokens", token_ids)
        for n in range(LAYERS):
            at = f"model.layers.{n}"
            x = x + attention(w, f"{at}.self_attn", rms(x, w[f"{at}.input_layernorm.weight"]))
            normed = rms(x, w[f"{at}.post_attention_layernorm.weight"])
            if n == 0:
                x = x + gated(w, f"{at}.mlp", normed)
                continue
            x = x + gated(w, f"{at}.mlp.shared_experts", normed) + experts(
                w, f"{at}.mlp", normed, num=8, top_k=3, score=torch.sigmoid, renormalize=True, factor=2.5,
                bias=f"{at}.mlp.gate.e_score_correction_bias",
            )  # fmt: skip
        return linear(w, "lm_head", rms(x, w["model.norm.weight"]))

    fields = {
        "num_key_value_heads": kv_heads, "qk_nope_dim": NOPE, "qk_rope_dim": ROPE, "v_channels": narrow,
        "param_sink_number": 3, "param_sink_with_value": True, "n_routed_experts": 8, "n_shared_experts": 1,
        "router_enable_expert_bias": True,
    }  # fmt: skip
    return LATENT | fields, shapes, forward


def lightning(w: Weights, at: str, x: Tensor, depth: float) -> Tensor:
    """S_t = exp(-slope) S_{t-1} + k_t v_t^T of each head, read by q_t; a norm of two groups, and a gate, behind it."""
    qkv = silu(linear(w, f"{at}.query_key_value", x)).unflatten(-1, (3, HEADS, -1))
    q, k, v = qkv.unbind(1)
    q, k = (rotate(rms(part, w[f"{at}.{name}_layernorm.weight"]), dims=8) for part, name in ((q, "query"), (k, "key")))
    slopes = 2.0 ** (-8 / HEADS * torch.arange(1, HEADS + 1, dtype=torch.float64)) * (1 - depth + 1e-5)
    state, rows = torch.zeros(HEADS, 16, 16, dtype=torch.float64), []
    for token in range(len(x)):
        state = torch.exp(-slopes)[:, None, None] * state + torch.einsum("hi,hj->hij", k[token], v[token])
        rows.append(torch.einsum("hi,hij->hj", q[token] / 4, state).flatten())
    normed = rms(torch.stack(rows).unflatten(-1, (2, -1))).flatten(-2) * w[f"{at}.g_norm.weight"]
    return linear(w, f"{at}.dense", normed * torch.sigmoid(linear(w, f"{at}.g_proj", x)))


def bailing_v2_5() -> Case:
    """Two layers with lightning attention, then one with latent attention; the first without experts."""
    width = HEADS * 16
    linear_part = {
        "attention.query_key_value.weight": (3 * width, HIDDEN), "attention.g_proj.weight": (width, HIDDEN),
        "attention.dense.weight": (HIDDEN, width), "attention.g_norm.weight": (width,),
        "attention.query_layernorm.weight": (16,), "attention.key_layernorm.weight": (16,),
    }  # fmt: skip
    latent_part = {
        name.replace("self_attn", "attention").replace("o_proj", "dense"): shape
        for name, shape in LATENT_ATTENTION.items()
    } | {"attention.q_proj.weight": (HEADS * (NOPE + ROPE), HIDDEN)}
    sparse = expert_shapes(HIDDEN, 8, 24, 24) | {"mlp.gate.expert_bias": (8,)}
    norms = {"input_layernorm.weight": (HIDDEN,), "post_attention_layernorm.weight": (HIDDEN,)}
    parts = (linear_part | MLP, linear_part | sparse, latent_part | sparse)
    shapes = {name.replace("embed_tokens", "word_embeddings"): shape for name, shape in ENDS.items()}
    shapes |= {f"model.layers.{n}.{name}": s for n, part in enumerate(parts) for name, s in (norms | part).items()}

    def forward(w: Weights, token_ids: Tensor) -> Tensor:
        x = embed(w, "model.word_embeddings", token_ids)
        for n in range(3):
            at = f"model.layers.{n}"
            normed = rms(x, w[f"{at}.input_layernorm.weight"])
            if n < 2:
                x = x + lightning(w, f"{at}.attention", normed, n / 2)
            else:
                own = {name.replace(".dense.", ".o_proj."): each for name, each in w.items()}
                x = x + latent_attention(own, f"{at}.attention", normed)
            normed = rms(x, w[f"{at}.post_attention_layernorm.weight"])
            if n == 0:
                x = x + gated(w, f"{at}.mlp", normed)
                continue
            x = x + gated(w, f"{at}.mlp.shared_experts", normed) + experts(
                w, f"{at}.mlp", normed, num=8, top_k=3, score=torch.sigmoid, renormalize=True, factor=2.5,
                bias=f"{at}.mlp.gate.expert_bias", groups=(4, 2),
            )  # fmt: skip
        return linear(w, "lm_head", rms(x, w["model.norm.weight"]))

    fields = {
        "num_hidden_layers": 3, "layer_group_size": 3, "head_dim": 16, "partial_rotary_factor": 0.5,
        "num_experts": 8, "num_shared_experts": 1, "score_function": "sigmoid", "moe_router_enable_expert_bias": True,
        "n_group": 4, "topk_group": 2, "use_qk_norm": True, "linear_silu": True, "group_norm_size": 2,
    }  # fmt: skip
    return LATENT | fields, shapes, forward


def test_layers_of_a_searched_nemotron_are_those_of_uniform_ones() -> None:
    fields = {**CASES_OF_CLASSES["NemotronHForCausalLM"].fields, "architectures": ["NemotronHForCausalLM"]}
    kinds = fields.pop("layers_block_type")
    blocks = [{"block_type": kind} for kind in kinds]
    assert "moe" in kinds
    sizes = [
        {"n_routed_experts": 4, "moe_intermediate_size": 24, "num_experts_per_tok": 2},
        {"n_routed_experts": 6, "moe_intermediate_size": 40, "num_experts_per_tok": 3},
    ]
    kinds, blocks = [*kinds, "moe"], [*blocks, {"block_type": "moe"}]
    uniform = [ModelConfig.from_dict({**fields, **size, "layers_block_type": kinds}).network for size in sizes]
    places = [place for place, kind in enumerate(kinds) if kind == "moe"]
    for place, size in zip(places, sizes, strict=True):
        blocks[place] |= size
    own = {name: value for name, value in fields.items() if name not in sizes[0]}
    puzzle = {**own, "architectures": ["NemotronHPuzzleForCausalLM"], "block_configs": blocks}
    network = ModelConfig.from_dict(puzzle).network
    expected = list(uniform[0].layers)
    expected[places[1]] = uniform[1].layers[places[1]]
    assert network == replace(uniform[0], layers=tuple(expected))


CASES: dict[str, Callable[[], Case]] = {
    "BailingMoeV2_5ForCausalLM": bailing_v2_5,
    "DomynEdgeForCausalLM": domyn_edge,
    "PanguProMoEV2ForCausalLM": pangu_pro,
    "PanguUltraMoEForCausalLM": pangu_ultra,
    "SarvamMLAForCausalLM": sarvam,
    "Step3TextForCausalLM": step3,
}


@pytest.mark.parametrize(("architecture", "case"), [*CASES.items(), ("PanguUltraMoEForCausalLM", pangu_first_named)])
def test_logits_are_those_of_a_forward_pass_in_float64(
    architecture: str, case: Callable[[], Case], tmp_path: Path
) -> None:
    config, shapes, forward = case()
    assert largest_error(tmp_path, {"architectures": [architecture], **config}, shapes, forward) < 1e-5


@pytest.mark.parametrize(
    ("architecture", "fields", "words"),
    [
        ("PanguProMoEV2ForCausalLM", {"v_channels": 21}, r"v_channels \(21\) at most"),
        (
            "PanguProMoEV2ForCausalLM",
            {"interleaved_sliding_window": 4},
            "interleaved_sliding_window 4 is not supported",
        ),
        ("PanguUltraMoEForCausalLM", {"param_sink_number": 4}, "param_sink_number 4 is not supported"),
        ("BailingMoeV2_5ForCausalLM", {"layer_group_size": 2}, r"layer_group_size \(2\) must divide num_hidden_layers"),
        ("BailingMoeV2_5ForCausalLM", {"group_norm_size": 3}, r"group_norm_size \(3\) must divide all heads' width"),
        ("BailingMoeV2_5ForCausalLM", {"use_bias": True}, "use_bias True is not supported"),
        ("DomynEdgeForCausalLM", {"window_sizes": [[5, 0]]}, "window_sizes must name one for each of 2 layers"),
        ("DomynEdgeForCausalLM", {"window_sizes": [1024, 1024]}, "window_sizes must be pairs"),
        ("DomynEdgeForCausalLM", {"window_sizes": [[5, 0], ["5", 0]]}, "window_sizes must be pairs"),
        ("DomynEdgeForCausalLM", {"per_layer_config": [{"head_dim": 16}]}, "per_layer_config must have an object"),
        ("DomynEdgeForCausalLM", {"per_layer_config": {"1": 24}}, "per_layer_config must have objects, has 24"),
        ("Step3TextForCausalLM", {"moe_layers_enum": "1;2"}, "moe_layers_enum must list layers"),
    ],
)
def test_what_is_not_computed_is_refused_by_name(architecture: str, fields: dict[str, Any], words: str) -> None:
    with pytest.raises(CheckpointError, match=words):
        ModelConfig.from_dict({"architectures": [architecture], **CASES[architecture]()[0], **fields})

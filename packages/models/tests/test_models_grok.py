"""Grok 1 and 2, which Transformers has no class for: logits beside a forward pass in float64, from the published
configurations."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from models_float64 import VOCAB, Weights, embed, heads, largest_error, linear, rms, rotate
from torch import Tensor
from torch.nn.functional import gelu, softmax

from quire_interfaces import CheckpointError
from quire_models import ModelConfig
from quire_models.families.grok import TemperedAttentionSpec
from quire_models.mixer_spec import SelfAttentionSpec

HIDDEN, DENSE, INNER, EXPERTS, HEADS, KV_HEADS, SIZE, EPS = 32, 48, 24, 4, 4, 2, 8, 0.05
NORMS = ("pre_attn_norm", "post_attn_norm", "pre_moe_norm", "post_moe_norm")
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": HIDDEN, "intermediate_size": DENSE, "num_hidden_layers": 2, "head_dim": SIZE,
    "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "max_position_embeddings": 64,
    "num_experts_per_tok": 2, "rms_norm_eps": EPS, "router_logit_softcapping": 0.7, "output_multiplier_scale": 0.5,
}  # fmt: skip
GROK_2 = SIZES | {
    "architectures": ["Grok1ForCausalLM"], "model_type": "git", "num_local_experts": EXPERTS, "residual_moe": True,
    "moe_intermediate_size": INNER, "embedding_multiplier_scale": 5.0, "attn_logit_softcapping": 1.5,
    "final_logit_softcapping": 2.0, "attn_temperature_len": 5, "rope_theta": 500.0, "sliding_window_size": -1,
    "global_attn_every_n": 1,
}  # fmt: skip
GROK_1 = SIZES | {
    "architectures": ["Grok1ModelForCausalLM"], "model_type": "grok-1", "num_experts": EXPERTS, "max_attn_value": 1.5,
    "attn_output_multiplier": SIZE**-0.5, "rope_rotate_half_dims": True,
}  # fmt: skip
GROK_1_EXPERT, GROK_2_EXPERT = ("linear", "linear_v", "linear_1"), ("w1", "w3", "w2")


def shapes_of(attention: str, sparse: str, names: tuple[str, str, str], inner: int) -> dict[str, tuple[int, ...]]:
    """Tensors of a checkpoint without a dense network."""
    layer: dict[str, tuple[int, ...]] = {f"{name}.weight": (HIDDEN,) for name in NORMS}
    layer |= {f"{attention}.{part}_proj.weight": (KV_HEADS * SIZE, HIDDEN) for part in "kv"}
    layer |= {
        f"{attention}.q_proj.weight": (HEADS * SIZE, HIDDEN),
        f"{attention}.o_proj.weight": (HIDDEN, HEADS * SIZE),
    }
    layer[f"{sparse}.gate.weight"] = (EXPERTS, HIDDEN)
    for number in range(EXPERTS):
        at = f"{sparse}.experts.{number}"
        layer |= {f"{at}.{name}.weight": (inner, HIDDEN) for name in names[:2]}
        layer[f"{at}.{names[2]}.weight"] = (HIDDEN, inner)
    ends = {"model.embed_tokens.weight": (VOCAB, HIDDEN), "model.norm.weight": (HIDDEN,)}
    ends["lm_head.weight"] = (VOCAB, HIDDEN)
    return ends | {f"model.layers.{n}.{name}": shape for n in range(2) for name, shape in layer.items()}


def capped(x: Tensor, cap: float) -> Tensor:
    return cap * torch.tanh(x / cap)


def attention(w: Weights, at: str, x: Tensor, *, theta: float, dims: int, tempered_from: int | None) -> Tensor:
    q, k, v = (heads(linear(w, f"{at}.{part}_proj", x), num) for part, num in (("q", HEADS), ("k", 2), ("v", 2)))
    q, k = rotate(q, theta, dims), rotate(k, theta, dims).repeat_interleave(HEADS // KV_HEADS, dim=1)
    scores = capped(torch.einsum("ihd,jhd->hij", q, k) / math.sqrt(SIZE), 1.5)
    if tempered_from is not None:
        for position in range(tempered_from + 1, len(x)):
            scores[:, position] *= math.log2(position) / math.log2(tempered_from)
    weights = softmax(scores.masked_fill(torch.ones(len(x), len(x)).triu(1).bool(), -torch.inf), dim=-1)
    attended = torch.einsum("hij,jhd->ihd", weights, v.repeat_interleave(HEADS // KV_HEADS, dim=1))
    return linear(w, f"{at}.o_proj", attended.flatten(1))


def gated(w: Weights, at: str, names: tuple[str, str, str], x: Tensor) -> Tensor:
    gate, up, down = (f"{at}.{name}" for name in names)
    return linear(w, down, gelu(linear(w, gate, x), approximate="tanh") * linear(w, up, x))


def experts(w: Weights, at: str, names: tuple[str, str, str], x: Tensor) -> Tensor:
    """The two best of each token, weighed with their probabilities among all."""
    rows = []
    for token in x:
        probabilities = softmax(capped(w[f"{at}.gate.weight"] @ token, 0.7), dim=-1)
        best = probabilities.topk(2).indices.tolist()
        rows.append(sum(probabilities[each] * gated(w, f"{at}.experts.{each}", names, token) for each in best))
    return torch.stack(rows)  # type: ignore[arg-type]  # tensors, there being two


def logits_of(w: Weights, token_ids: Tensor, *, is_second: bool) -> Tensor:
    x = embed(w, "model.embed_tokens", token_ids) * (5.0 if is_second else 78.38367176906169)
    for n in range(2):
        at = f"model.layers.{n}"
        first, behind, second, last = (w[f"{at}.{name}.weight"] for name in NORMS)
        normed = rms(x, first, EPS)
        if is_second:
            attended = attention(w, f"{at}.self_attn", normed, theta=500.0, dims=SIZE, tempered_from=5)
        else:
            attended = attention(w, f"{at}.attn", normed, theta=10000.0, dims=SIZE // 2, tempered_from=None)
        x = x + rms(attended, behind, EPS)
        normed = rms(x, second, EPS)
        if is_second:
            dense = gated(w, f"{at}.mlp", ("gate_proj", "up_proj", "down_proj"), normed)
            out = (dense + experts(w, f"{at}.block_sparse_moe", GROK_2_EXPERT, normed)) / math.sqrt(2)
        else:
            out = experts(w, f"{at}.moe_block", GROK_1_EXPERT, normed)
        x = x + rms(out, last, EPS)
    logits = linear(w, "lm_head", rms(x, w["model.norm.weight"], EPS)) * 0.5
    return capped(logits, 2.0) if is_second else logits


def test_logits_of_grok_2(tmp_path: Path) -> None:
    shapes = shapes_of("self_attn", "block_sparse_moe", GROK_2_EXPERT, INNER)
    for n in range(2):
        shapes |= {f"model.layers.{n}.mlp.{part}_proj.weight": (DENSE, HIDDEN) for part in ("gate", "up")}
        shapes[f"model.layers.{n}.mlp.down_proj.weight"] = (HIDDEN, DENSE)
    assert largest_error(tmp_path, GROK_2, shapes, lambda w, ids: logits_of(w, ids, is_second=True)) < 1e-5


def test_logits_of_grok_1(tmp_path: Path) -> None:
    shapes = shapes_of("attn", "moe_block", GROK_1_EXPERT, DENSE)
    assert largest_error(tmp_path, GROK_1, shapes, lambda w, ids: logits_of(w, ids, is_second=False)) < 1e-5


def test_scores_stay_in_memory_only_where_a_position_is_beyond_the_length() -> None:
    for context, kind in ((5, SelfAttentionSpec), (6, SelfAttentionSpec), (7, TemperedAttentionSpec)):
        network = ModelConfig.from_dict({**GROK_2, "max_position_embeddings": context}).network
        assert type(network.mixers[0]) is kind


def test_media_of_another_network_of_that_model_type_are_not_asked_for() -> None:
    assert ModelConfig.from_dict(GROK_2).media is None


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"attn_output_multiplier": 0.5}, "attn_output_multiplier 0.5 is not supported"),
        ({"rope_type": "yarn_log"}, "rope_type 'yarn_log' is not supported"),
        ({"sliding_window_size": 128}, "sliding_window_size 128 is not supported"),
        ({"global_attn_every_n": 2}, "global_attn_every_n 2 is not supported"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported"),
        ({"num_experts_per_tok": 5}, r"num_experts_per_tok \(5\) must be at most num_local_experts \(4\)"),
    ],
)
def test_what_is_not_computed_is_refused_by_name(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(CheckpointError, match=words):
        ModelConfig.from_dict({**GROK_2, **fields})

"""Networks of classes that came with code of their own, and with layers other than Llama's: their logits beside a
forward pass in float64, written out or of a class of Transformers with the same arithmetic under other names."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from models_float64 import VOCAB, Weights, attend, embed, gated, heads, largest_error, linear, rms, rotate
from models_paged_driver import PagedDriver
from safetensors.torch import load_file, save_file
from torch import Tensor

from quire_interfaces import CheckpointError
from quire_models import DecoderLM, ModelConfig, build_model, load_model
from quire_models.families.solar import SkippingSpec
from quire_models.families.solar_layers import Skips
from quire_testkit.parity.cases import CASES as CASES_OF_CLASSES
from quire_testkit.parity.oracle import write_checkpoint

HIDDEN, INNER, HEADS, KV_HEADS, SIZE = 64, 96, 4, 2, 16
Case = tuple[dict[str, Any], dict[str, tuple[int, ...]], Callable[[Weights, Tensor], Tensor]]
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": HIDDEN, "intermediate_size": INNER, "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS, "rms_norm_eps": 1e-5, "max_position_embeddings": 64, "tie_word_embeddings": False,
}  # fmt: skip
ENDS = {"model.embed_tokens.weight": (VOCAB, HIDDEN), "model.norm.weight": (HIDDEN,), "lm_head.weight": (VOCAB, HIDDEN)}
LAYER = {
    "self_attn.q_proj.weight": (HEADS * SIZE, HIDDEN),
    "self_attn.k_proj.weight": (KV_HEADS * SIZE, HIDDEN),
    "self_attn.v_proj.weight": (KV_HEADS * SIZE, HIDDEN),
    "self_attn.o_proj.weight": (HIDDEN, HEADS * SIZE),
    "mlp.gate_proj.weight": (INNER, HIDDEN),
    "mlp.up_proj.weight": (INNER, HIDDEN),
    "mlp.down_proj.weight": (HIDDEN, INNER),
    "input_layernorm.weight": (HIDDEN,),
    "post_attention_layernorm.weight": (HIDDEN,),
}


def shapes_of(layers: int) -> dict[str, tuple[int, ...]]:
    """Tensors of a Llama."""
    return ENDS | {f"model.layers.{n}.{name}": shape for n in range(layers) for name, shape in LAYER.items()}


def normed(w: Weights, name: str, x: Tensor) -> Tensor:
    return rms(x, w[f"{name}.weight"], 1e-5)


def projected(w: Weights, at: str, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values of what a layer takes."""
    x = normed(w, f"{at}.input_layernorm", x)
    q, k, v = (linear(w, f"{at}.self_attn.{part}_proj", x) for part in "qkv")
    return heads(q, HEADS), heads(k, KV_HEADS), heads(v, KV_HEADS)


def finished(w: Weights, at: str, x: Tensor, attended: Tensor) -> Tensor:
    """The stream behind a layer."""
    x = x + linear(w, f"{at}.self_attn.o_proj", attended)
    return x + gated(w, f"{at}.mlp", normed(w, f"{at}.post_attention_layernorm", x))


def logits(w: Weights, x: Tensor) -> Tensor:
    return linear(w, "lm_head", normed(w, "model.norm", x))


def step1() -> Case:
    """The score of a key d tokens back falls by the head's slope, 2^-2 to 2^-8, times the root of d."""

    def forward(w: Weights, token_ids: Tensor) -> Tensor:
        x = embed(w, "model.embed_tokens", token_ids)
        places = torch.arange(len(token_ids), dtype=torch.float64)
        roots = (places[:, None] - places).clamp_min(0).sqrt()
        slopes = torch.tensor([2.0**-2, 2.0**-4, 2.0**-6, 2.0**-8], dtype=torch.float64)
        for n in range(2):
            at = f"model.layers.{n}"
            x = finished(w, at, x, attend(*projected(w, at, x), bias=-slopes[:, None, None] * roots))
        return logits(w, x)

    config = {name: value for name, value in SIZES.items() if name != "num_key_value_heads"}
    return config | {"num_hidden_layers": 2, "num_attention_groups": KV_HEADS}, shapes_of(2), forward


def solar() -> Case:
    """Before layer 2 the stream is mixed with what it was before layer 0, before layer 3 with that before layer 1."""

    def forward(w: Weights, token_ids: Tensor) -> Tensor:
        x, before = embed(w, "model.embed_tokens", token_ids), []
        for n in range(4):
            if n >= 2:
                x = 0.8 * before[n - 2] + 0.2 * x
            before.append(x)
            at = f"model.layers.{n}"
            q, k, v = projected(w, at, x)
            x = finished(w, at, x, attend(rotate(q), rotate(k), v, window=9))
        return logits(w, x)

    fields = {
        "num_hidden_layers": 4, "sliding_window": 9, "rope_theta": 10000.0, "bskcn_1": [0], "bskcn_2": [1],
        "bskcn_3": [2], "bskcn_4": [3], "bskcn_tv": [0.9, 0.8],
    }  # fmt: skip
    return SIZES | fields, shapes_of(4), forward


def loop_coder() -> Case:
    """Two layers run twice; in the second run a window of five tokens, and all tokens of the first."""
    gates = {f"model.gate_projections.{n}.weight": (HEADS, SIZE) for n in range(2)}
    gates |= {f"model.gate_projections.{n}.bias": (HEADS,) for n in range(2)}

    def forward(w: Weights, token_ids: Tensor) -> Tensor:
        x, kept = embed(w, "model.embed_tokens", token_ids), []
        for n in range(2):
            at = f"model.layers.{n}"
            q, k, v = projected(w, at, x)
            kept.append((rotate(k), v))
            x = finished(w, at, x, attend(rotate(q), *kept[n]))
        for n in range(2):
            at, name = f"model.layers.{n}", f"model.gate_projections.{n}"
            q, k, v = projected(w, at, x)
            q = rotate(q)
            gate = torch.sigmoid((q * w[f"{name}.weight"]).sum(-1) + w[f"{name}.bias"])[..., None]
            of_all, of_last = heads(attend(q, *kept[n]), HEADS), heads(attend(q, rotate(k), v, window=5), HEADS)
            x = finished(w, at, x, (gate * of_all + (1 - gate) * of_last).flatten(1))
        return logits(w, x)

    fields = {"num_hidden_layers": 2, "rope_theta": 10000.0, "loop_num": 2, "loop_window_size": 5}
    return SIZES | fields, shapes_of(2) | gates, forward


def behind_text_model(
    fields: dict[str, Any],
    model: Any,
    theirs: Callable[[Weights], dict[str, Tensor]],
    *,
    names: dict[str, tuple[int, ...]],
) -> Case:
    """A body of Transformers, and a head behind it.

    Args:
        theirs: The checkpoint -> the body's tensors.
        names: The checkpoint's tensors.
    """
    body = model.double().eval()

    def forward(w: Weights, token_ids: Tensor) -> Tensor:
        missing, unexpected = body.load_state_dict(theirs(w), strict=False)
        assert not missing
        assert not unexpected
        with torch.inference_mode():
            hidden = body(input_ids=token_ids[None]).last_hidden_state[0]
        return hidden @ w["lm_head.weight"].T

    return fields, names | {"lm_head.weight": (VOCAB, HIDDEN)}, forward


def muse_glimmer() -> Case:
    fields = SIZES | {
        "num_hidden_layers": 4, "head_dim": SIZE, "sliding_window": 9, "layer_rope_theta": [0, 10000.0, 10000.0, 0],
        "layer_types": ["full_attention", "sliding_attention", "sliding_attention", "full_attention"],
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}, "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip
    model = transformers.MuseGlimmerTextModel(transformers.MuseGlimmerTextConfig(**fields))
    names = {f"model.{name}": tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    config, shapes, forward = behind_text_model(
        fields,
        model,
        lambda w: {name.removeprefix("model."): tensor for name, tensor in w.items() if "lm_head" not in name},
        names=names,
    )

    def capped(w: Weights, token_ids: Tensor) -> Tensor:
        return 20 * torch.tanh(forward(w, token_ids) * 0.25 / 20)

    return config | {"output_multiplier": 0.25}, shapes, capped


def glm5_next() -> Case:
    """Names as published: convolutions, and matrices of experts, one by one."""
    attends = ["indexed_attention", "linear_attention", "indexed_attention", "indexed_attention"]
    fields: dict[str, Any] = {
        **SIZES, "num_key_value_heads": SIZES["num_attention_heads"], "num_hidden_layers": 4, "layer_types": attends,
        "indexer_types": ["full", "full", "full", "shared"], "mlp_layer_types": ["dense", "sparse", "sparse", "dense"],
        "q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 12, "v_head_dim": 20, "moe_intermediate_size": 24,
        "n_routed_experts": 6, "num_experts_per_tok": 2, "swiglu_limit": 0.5, "linear_head_dim": SIZE,
        "linear_num_heads": 3, "index_n_heads": 8, "index_head_dim": 20, "index_topk": 6, "index_kpool": 3,
        "hc_mult": 2, "hc_sinkhorn_iters": 3, "pad_token_id": 0, "eos_token_id": 2,
    }  # fmt: skip
    model = transformers.models.glm5_next.modeling_glm5_next.Glm5NextTextModel(
        transformers.models.glm5_next.Glm5NextTextConfig(**fields)
    )
    model.set_experts_implementation("eager")  # others take no float64
    published = (("attn_hc.", "hc_attn_"), ("ffn_hc.", "hc_ffn_"), (".forget_gate.", "."))
    convolutions = [f"{part}_conv1d" for part in "qkv"]

    def ours(name: str) -> list[str]:
        for old, new in published:
            name = name.replace(old, new)
        return [f"model.{name.replace('conv1d', each)}" for each in (convolutions if "conv1d" in name else [""])]

    names: dict[str, tuple[int, ...]] = {}
    for name, tensor in model.state_dict().items():
        found = ours(name)
        names |= dict.fromkeys(found, (len(tensor) // len(found), *tensor.shape[1:]))

    def theirs(w: Weights) -> dict[str, Tensor]:
        return {name: torch.cat([w[each] for each in ours(name)]) for name in model.state_dict()}

    return behind_text_model(fields, model, theirs, names=names)


def step3p5() -> Case:
    """Names as published: experts in one tensor each of gate, up and down, a shared network beside them."""
    fields: dict[str, Any] = {
        **SIZES, "num_hidden_layers": 4, "head_dim": SIZE, "sliding_window": 9, "moe_intermediate_size": 24,
        "share_expert_dim": 40, "moe_layers_enum": "1,2,3", "moe_router_scaling_factor": 1.5,
        "layer_types": ["full_attention", "sliding_attention", "full_attention", "sliding_attention"],
        "rope_theta": [10000.0, 500.0, 10000.0, 500.0], "partial_rotary_factors": [0.5, 1.0, 0.5, 1.0],
        "swiglu_limits": [0, 0, 0.5, 0], "swiglu_limits_shared": [0.5, 0, 0, 0.5], "num_sliding_attention_heads": 6,
        "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip
    of_class = fields | {"n_routed_experts": 6, "num_experts_per_tok": 2}
    model = transformers.models.step3p7.Step3p7TextModel(transformers.models.step3p7.Step3p7TextConfig(**of_class))
    published = {
        ".mlp.gate.weight": ".moe.gate.weight",
        ".mlp.gate.e_score_correction_bias": ".moe.router_bias",
        ".mlp.experts.down_proj": ".moe.down_proj.weight",
        ".mlp.shared_experts.": ".share_expert.",
    }

    def ours(name: str) -> str:
        for old, new in published.items():
            name = name.replace(old, new)
        return f"model.{name}"

    names: dict[str, tuple[int, ...]] = {}
    for name, tensor in model.state_dict().items():
        if name.endswith("experts.gate_up_proj"):
            at = f"model.{name.removesuffix('.mlp.experts.gate_up_proj')}.moe"
            names |= dict.fromkeys((f"{at}.gate_proj.weight", f"{at}.up_proj.weight"), (6, 24, HIDDEN))
        else:
            names[ours(name)] = tuple(tensor.shape)

    def theirs(w: Weights) -> dict[str, Tensor]:
        found = {}
        for name in model.state_dict():
            if name.endswith("experts.gate_up_proj"):
                at = f"model.{name.removesuffix('.mlp.experts.gate_up_proj')}.moe"
                found[name] = torch.cat((w[f"{at}.gate_proj.weight"], w[f"{at}.up_proj.weight"]), dim=1)
            else:
                found[name] = w[ours(name)]
        return found

    config = fields | {"moe_num_experts": 6, "moe_top_k": 2, "num_attention_groups": KV_HEADS}
    del config["num_key_value_heads"]
    _, shapes, forward = behind_text_model(config, model, theirs, names=names)
    return config, shapes, forward


CASES: dict[str, Callable[[], Case]] = {
    "Glm5NextForCausalLM": glm5_next,
    "IQuestLoopCoderForCausalLM": loop_coder,
    "MuseGlimmerForCausalLM": muse_glimmer,
    "SolarForCausalLM": solar,
    "Step1ForCausalLM": step1,
    "Step3p5ForCausalLM": step3p5,
}


@pytest.mark.parametrize("architecture", CASES)
def test_logits_are_those_of_a_forward_pass_in_float64(architecture: str, tmp_path: Path) -> None:
    config, shapes, forward = CASES[architecture]()
    assert largest_error(tmp_path, {"architectures": [architecture], **config}, shapes, forward) < 1e-5


def test_layers_of_step1_share_their_biases() -> None:
    config = ModelConfig.from_dict({"architectures": ["Step1ForCausalLM"], **CASES["Step1ForCausalLM"]()[0]})
    network = build_model(config, dtype="float32")
    assert isinstance(network, DecoderLM)
    tables = {id(layer.mixer._bias) for layer in network.layers}  # type: ignore[attr-defined]  # all of one kind
    assert (len(network.layers), len(tables)) == (2, 1)


def test_solar_keeps_nothing_for_the_next_step() -> None:
    network = ModelConfig.from_dict({"architectures": ["SolarForCausalLM"], **CASES["SolarForCausalLM"]()[0]}).network
    assert isinstance(network, SkippingSpec)
    skips = Skips(network)
    for layer in range(len(network.layers)):
        skips(layer, torch.ones(2, 4))
    assert skips._kept == {}


def test_mimo_v2_is_the_network_of_its_first_checkpoint() -> None:
    """The same fields under the names of Transformers' class, and as published."""
    fields = {**CASES_OF_CLASSES["MiMoV2FlashForCausalLM"].fields, "mlp_layer_types": ["dense", "sparse", "sparse"]}
    known = ModelConfig.from_dict({**fields, "architectures": ["MiMoV2FlashForCausalLM"]}).network
    published = {name: value for name, value in fields.items() if name not in ("layer_types", "mlp_layer_types")}
    published |= {
        "hybrid_layer_pattern": [0, 1, 0], "moe_layer_freq": [0, 1, 1], "swa_num_key_value_heads": 4,
        "sliding_window_size": 19, "rope_theta": 5000000, "swa_rope_theta": 10000, "partial_rotary_factor": 0.334,
        "add_swa_attention_sink_bias": True, "add_full_attention_sink_bias": False, "layernorm_epsilon": 1e-5,
    }  # fmt: skip
    assert ModelConfig.from_dict({**published, "architectures": ["MiMoV2ForCausalLM"]}).network == known


def test_the_text_of_a_hyperclova_that_sees_is_served(tmp_path: Path) -> None:
    """As published: the language model within a class of its makers', and a tower that nobody here has a class for."""
    (alone := tmp_path / "alone").mkdir()
    (whole := tmp_path / "whole").mkdir()
    write_checkpoint(alone, "HyperCLOVAXForCausalLM", CASES_OF_CLASSES["HyperCLOVAXForCausalLM"])
    tensors = load_file(alone / "model.safetensors")
    tower = {"model.vision_model.blocks.0.norm1.weight": torch.ones(4)}
    save_file(
        {f"model.language_model.{name}": each for name, each in tensors.items()} | tower, whole / "model.safetensors"
    )
    text = json.loads((alone / "config.json").read_text())
    outer = {"architectures": ["HCXVisionV2ForCausalLM"], "model_type": "vlm", "text_config": text, "vision_config": {}}
    (whole / "config.json").write_text(json.dumps(outer))
    token_ids = [3, 17, 91, 5, 44, 8]
    found = []
    for folder in (alone, whole):
        network = load_model(ModelConfig.from_path(folder), folder, dtype="float32")
        assert isinstance(network, DecoderLM)
        driver = PagedDriver(network, block_size=4, shuffle=True)
        sequence = driver.add(token_ids)
        driver.run(sequence, 6)
        found.append(torch.stack(sequence.logits))
    assert torch.equal(*found)
    assert "code of their own" in ModelConfig.from_path(whole).media_refusal


@pytest.mark.parametrize(
    ("architecture", "fields", "words"),
    [
        ("SolarForCausalLM", {"bskcn_1": [1], "bskcn_3": [0]}, "bskcn mixes before layer 0"),
        ("SolarForCausalLM", {"bskcn_1": [99]}, "bskcn_1 must list some of"),
        ("SolarForCausalLM", {"bskcn_4": [-1]}, "bskcn_4 must list some of"),
        ("SolarForCausalLM", {"bskcn_tv": [0.9]}, "bskcn_tv must have two numbers"),
        ("IQuestLoopCoderForCausalLM", {"loop_num": 3}, "loop_num 3 is not supported"),
        ("Glm5NextForCausalLM", {"qk_rope_head_dim": 8}, "qk_rope_head_dim 8 is not supported"),
        (
            "Glm5NextForCausalLM",
            {"index_kpool_always_select_tail": False},
            "index_kpool_always_select_tail False is not",
        ),
        ("Glm5NextForCausalLM", {"index_kpool": 4}, r"index_topk \(6\) must be a multiple of index_kpool \(4\)"),
        (
            "Glm5NextForCausalLM",
            {"layer_types": ["linear_attention"] * 3 + ["indexed_attention"]},
            "layer 3, the first that attends, must have an index of its own",
        ),
        ("Glm5NextForCausalLM", {"swiglu_limit": 0.0}, "swiglu_limit must be greater than 0.0"),
        ("MuseGlimmerForCausalLM", {"layer_rope_theta": [1e4]}, "layer_rope_theta must have a number for each of 4"),
        ("Step3p5ForCausalLM", {"moe_layers_enum": "1;2"}, "moe_layers_enum must list layers"),
    ],
)
def test_what_is_not_computed_is_refused_by_name(architecture: str, fields: dict[str, Any], words: str) -> None:
    with pytest.raises(CheckpointError, match=words):
        ModelConfig.from_dict({"architectures": [architecture], **CASES[architecture]()[0], **fields})


@pytest.mark.parametrize(
    ("fields", "bound"),
    [
        ({}, -5.0),
        ({"linear_lower_bound": -2.0}, -2.0),
        ({"linear_lower_bound": None}, None),
        ({"linear_lower_bound": None, "linear_attn_config": {"num_heads": 3}}, -5.0),
        ({"linear_attn_config": {"num_heads": 3, "gate_lower_bound": None, "safe_gate": False}}, None),
    ],
)
def test_decays_have_the_bound_of_transformers(fields: dict[str, Any], bound: float | None) -> None:
    values = glm5_next()[0] | {"architectures": ["Glm5NextForCausalLM"], **fields}
    (delta,) = (each for each in ModelConfig.from_dict(values).network.mixers if each.states)
    assert delta.lower_bound == bound  # type: ignore[attr-defined]  # of a KimiDeltaSpec
    own = transformers.models.glm5_next.Glm5NextTextConfig(**{**glm5_next()[0], **fields})
    assert own.linear_lower_bound == bound

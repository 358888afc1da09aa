"""What a params.json says, as the config.json of Transformers' class of the same network. Free of torch."""

from __future__ import annotations

import re
from typing import Any, NamedTuple

from quire_interfaces import CheckpointError, Fields

__all__ = ["MistralConfig", "config_values", "in_names_of_params"]

DEFAULT_CONTEXT = 128_000
"""Tokens of context where params.json does not say, as vLLM takes them."""
_ADVICE = "use the files that Transformers reads (config.json, model.safetensors), where the model has them"
_TOWERS = ("vision_encoder", "multimodal")
_SIZES = {
    "hidden_size": "dim",
    "num_hidden_layers": "n_layers",
    "num_attention_heads": "n_heads",
    "vocab_size": "vocab_size",
    "intermediate_size": "hidden_dim",
}
_LATENT_SIZES = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
_EXPERT_SIZES = {
    "n_routed_experts": "num_experts",
    "num_experts_per_tok": "num_experts_per_tok",
    "moe_intermediate_size": "expert_hidden_dim",
}


_OTHERS = {
    "num_key_value_heads": "n_kv_heads",
    "rms_norm_eps": "norm_eps",
    "tie_word_embeddings": "tied_embeddings",
    "num_local_experts": "moe.num_experts",
    "rope_parameters.factor": "yarn.factor",
    "rope_parameters.beta_fast": "yarn.beta",
    "rope_parameters.beta_slow": "yarn.alpha",
    "rope_parameters.llama_4_scaling_beta": "llama_4_scaling.beta",
    "rope_parameters.rope_theta": "rope_theta",
    "n_shared_experts": "moe.num_shared_experts",
    "first_k_dense_replace": "moe.first_k_dense_replace",
    "n_group": "moe.num_expert_groups",
    "topk_group": "moe.num_expert_groups_per_tok",
    "routed_scaling_factor": "moe.routed_scale",
}
_STORED_AS = {**_SIZES, **{name: f"moe.{stored}" for name, stored in _EXPERT_SIZES.items()}, **_OTHERS}
"""Field of config.json -> of params.json."""
_FIELD = re.compile(r"[\w.]+")


class MistralConfig(NamedTuple):
    """What was made of a params.json."""

    values: dict[str, Any]
    """The content of config.json, without a dtype."""
    unread: tuple[str, ...]
    """Fields that are set and of which nothing was made."""
    towers: tuple[str, ...]
    """Fields that describe towers, which are not served."""


def config_values(params: Fields) -> MistralConfig:
    """The config.json for a params.json.

    Raises:
        CheckpointError: a field is missing or wrong, or says something that no network here is.
    """
    params.fixed("model_type", "transformer")
    params.fixed("activation", "silu")
    params.fixed("causal", True)
    for name in ("use_biases", "ada_rms_norm_t_cond", "lora"):
        params.fixed(name, False)
    towers = tuple(name for name in _TOWERS if params.get(name) is not None)
    params.skip("max_batch_size", "dtype")
    values: dict[str, Any] = {name: params.integer(stored, minimum=1) for name, stored in _SIZES.items()}
    heads = values["num_attention_heads"]
    context = params.integer("max_seq_len", default=DEFAULT_CONTEXT, minimum=1)
    values |= {
        "num_key_value_heads": params.integer("n_kv_heads", default=heads, minimum=1),
        "max_position_embeddings": params.integer("max_position_embeddings", default=context, minimum=1),
        "rms_norm_eps": params.number("norm_eps", default=1e-5, minimum=0.0),
        "hidden_act": "silu",
        "tie_word_embeddings": params.flag("tied_embeddings", default=False),
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    is_latent, moe = params.get("kv_lora_rank") is not None, params.object("moe")
    values |= _windows(params, values["num_hidden_layers"])
    values["rope_parameters"] = _rotation(params, is_latent=is_latent)
    if is_latent:
        params.skip("head_dim", "v_head_dim")
        params.fixed("sliding_window")
        values |= _latent(params) | _experts(params, moe)
        kind = ("MistralLarge3ForCausalLM", "mistral4")
    else:
        values["head_dim"] = params.integer("head_dim", default=values["hidden_size"] // heads, minimum=2)
        kind = _dense_kind(params, moe, values)
    values |= {"architectures": [kind[0]], "model_type": kind[1]}
    if (quantization := _quantization(params)) is not None:
        values["quantization_config"] = quantization
    return MistralConfig(values, tuple(params.unread()), towers)


def in_names_of_params(message: str) -> str:
    """A message about fields of config.json, about those of the params.json that they were made of."""
    return _FIELD.sub(lambda found: _STORED_AS.get(found[0], found[0]), message)


def _dense_kind(params: Fields, moe: Fields | None, values: dict[str, Any]) -> tuple[str, str]:
    """Class and model_type of a network with keys and values; Mixtral's counts of experts go to `values`."""
    grows = params.get("llama_4_scaling") is not None
    if moe is None:
        return ("Ministral3ForCausalLM", "ministral3") if grows else ("MistralForCausalLM", "mistral")
    moe.fixed("num_shared_experts", 0)
    if grows:
        raise CheckpointError(
            f"{params.source}: moe beside llama_4_scaling is known of latent attention only; {_ADVICE}"
        )
    values["num_local_experts"] = moe.integer("num_experts", minimum=1)
    values["num_experts_per_tok"] = moe.integer("num_experts_per_tok", minimum=1)
    return "MixtralForCausalLM", "mixtral"


def _latent(params: Fields) -> dict[str, Any]:
    """Sizes of latent attention, which have the names of Transformers."""
    sizes: dict[str, Any] = {name: params.integer(name, minimum=1) for name in _LATENT_SIZES}
    return sizes | {"q_lora_rank": params.integer("q_lora_rank", default=None, minimum=1)}


def _experts(params: Fields, moe: Fields | None) -> dict[str, Any]:
    """Experts of Mistral Large 3, which are those of Mistral Small 4."""
    if moe is None:
        raise CheckpointError(f"{params.source}: latent attention without moe is not supported; {_ADVICE}")
    moe.fixed("route_every_n", 1)
    moe.fixed("renorm_strategy", "WEIGHTS")
    moe.fixed("use_load_balancing_bias", False)
    values: dict[str, Any] = {name: moe.integer(stored, minimum=1) for name, stored in _EXPERT_SIZES.items()}
    return values | {
        "first_k_dense_replace": moe.integer("first_k_dense_replace", default=0, minimum=0),
        "n_shared_experts": moe.integer("num_shared_experts", default=0, minimum=0),
        "n_group": moe.integer("num_expert_groups", default=1, minimum=1),
        "topk_group": moe.integer("num_expert_groups_per_tok", default=1, minimum=1),
        "routed_scaling_factor": moe.number("routed_scale", default=1.0),
        "norm_topk_prob": True,
    }


def _windows(params: Fields, num_layers: int) -> dict[str, Any]:
    """`sliding_window`: one number for all layers, or a pattern of windows and null that is repeated."""
    window = params.get("sliding_window")
    if window is None:
        return {}
    if not isinstance(window, list):
        return {"sliding_window": params.integer("sliding_window", minimum=1)}
    sizes = {size for size in window if size is not None}
    if not window or num_layers % len(window) or len(sizes) > 1 or not all(isinstance(size, int) for size in sizes):
        raise CheckpointError(
            f"{params.source}: sliding_window must be a number, or a list of one number and null whose length divides "
            f"the {num_layers} layers, is {window!r}; {_ADVICE}"
        )
    kinds = ["full_attention" if size is None else "sliding_attention" for size in window]
    return {"sliding_window": next(iter(sizes), None), "layer_types": kinds * (num_layers // len(window))}


def _rotation(params: Fields, *, is_latent: bool) -> dict[str, Any]:
    """`rope_theta`, `yarn` and `llama_4_scaling` as `rope_parameters`.

    Args:
        is_latent: Scores of latent attention take the factor of long contexts, in the place of cosines and sines.
    """
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": params.number("rope_theta", default=1e4, above=1.0)}
    if (yarn := params.object("yarn")) is not None:
        rope |= {
            "rope_type": "yarn",
            "factor": yarn.number("factor", minimum=1.0),
            "original_max_position_embeddings": yarn.integer("original_max_position_embeddings", minimum=1),
            "beta_fast": yarn.number("beta", default=32.0),
            "beta_slow": yarn.number("alpha", default=1.0),
        }
        if not yarn.flag("apply_scale", default=True):
            rope["attention_factor"] = 1.0
        elif is_latent:
            rope |= {"mscale": 1.0, "mscale_all_dim": 1.0}
    if (growth := params.object("llama_4_scaling")) is not None:
        step = growth.integer("original_max_position_embeddings", minimum=1)
        if rope.setdefault("original_max_position_embeddings", step) != step:
            raise CheckpointError(
                f"{params.source}: yarn and llama_4_scaling have other values of original_max_position_embeddings "
                f"({rope['original_max_position_embeddings']} and {step}); {_ADVICE}"
            )
        rope["llama_4_scaling_beta"] = growth.number("beta", minimum=0.0)
    return rope


def _quantization(params: Fields) -> dict[str, Any] | None:
    """FP8 with one scale for a matrix, whose inputs have one that is stored, or none."""
    quantization = params.object("quantization")
    if quantization is None:
        return None
    kind = quantization.get("qformat_weight")
    if kind != "fp8_e4m3":
        what = f"qformat_weight {kind!r}" if kind is not None else f"quant_method {quantization.get('quant_method')!r}"
        raise CheckpointError(f"{quantization.source}: {what} is not read from params.json; {_ADVICE}")
    quantization.fixed("qscheme_act", "NO_SCALES", "TENSOR")
    is_dynamic = quantization.get("qscheme_act") == "NO_SCALES"
    return {"quant_method": "fp8", "activation_scheme": "dynamic" if is_dynamic else "static"}

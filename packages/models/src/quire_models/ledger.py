"""What a network's weights take, from its configuration alone. Free of torch: planners use it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial

from quire_interfaces import ConfigError
from quire_models.config import DTYPE_BYTES, ModelConfig
from quire_models.encoder_config import EncoderDecoderConfig
from quire_models.moe_config import MoEConfig
from quire_models.recurrent_config import RecurrentConfig

__all__ = ["WEIGHT_BYTES", "linear_shapes", "num_parameters", "weight_ledger"]


def _int4_bytes(group_size: int, out_features: int, in_features: int, dtype_bytes: int) -> int:
    # Whole pieces of 128 inputs; a scale per group for whole blocks of 16 outputs.
    groups = -(-in_features // group_size)
    return out_features * -(-in_features // 128) * 64 + -(-out_features // 16) * 16 * groups * dtype_bytes


def _fp8_bytes(group_size: int, out_features: int, in_features: int, dtype_bytes: int) -> int:
    return out_features * in_features + -(-out_features // 16) * 16 * -(-in_features // group_size) * dtype_bytes


WEIGHT_BYTES: dict[str, Callable[[int, int, int], int]] = {
    "plain": lambda out_features, in_features, dtype_bytes: out_features * in_features * dtype_bytes,
    "int8": lambda out_features, in_features, dtype_bytes: out_features * (in_features + dtype_bytes),
    "w8a8": lambda out_features, in_features, dtype_bytes: out_features * (in_features + dtype_bytes) + 4,
    "int4": partial(_int4_bytes, 128),
    "int4-g64": partial(_int4_bytes, 64),
    "int4-g32": partial(_int4_bytes, 32),
    "fp8": partial(_fp8_bytes, 128),
    "mxfp8": partial(_fp8_bytes, 32),
}
"""Linear method -> bytes of a weight, as `LinearMethod.weight_bytes` says (a test holds the two together)."""
_ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
_MLP = ("gate_proj", "up_proj", "down_proj")
_ANY_LAYER = "model.layers.0.mlp.up_proj"
"""Where only shapes are known: a name that is not of a layer that is left out."""


def _counted_ledger(config: ModelConfig, element: int, head: int) -> dict[str, int]:
    """For a network of which only the number of its weights is known."""
    assert config.stored_parameters is not None
    embedding = config.vocab_size * config.hidden_size * element
    layers = max(0, config.stored_parameters * element - embedding - head)
    return {"embedding": embedding, "attention": 0, "MLP": layers, "norms": 0, "LM head": head}


def weight_ledger(config: ModelConfig, dtype: str, linear_method: str = "plain") -> dict[str, int]:
    """Part of the network -> bytes of its weights.

    Args:
        config: The network.
        dtype: What it runs in: "float32", "bfloat16" or "float16".
        linear_method: How linear layers and the LM head keep their weights; the others keep theirs as they are.

    Raises:
        ConfigError: there is no such method.
    """
    if linear_method not in WEIGHT_BYTES:
        raise ConfigError(
            f"there is no linear method {linear_method!r}; choose one of {', '.join(WEIGHT_BYTES)}",
            field="quantization",
        )
    element, of_head = DTYPE_BYTES[dtype], WEIGHT_BYTES[linear_method]
    stored = config.quantization

    def linear(name: str, outputs: int, inputs: int) -> int:
        return of_head(outputs, inputs, element) if stored is None else stored.bytes_of(name, outputs, inputs, element)

    # A tied head shares the embedding, but in another form it is a copy of its own.
    is_shared = config.tie_word_embeddings and not config.has_own_head and linear_method == "plain"
    head_form = None if stored is None else stored.of_head("lm_head", tied=is_shared)
    head = 0 if is_shared else of_head(config.vocab_size, config.embedding_width, element)
    if head_form is not None:
        head = head_form.bytes_as(head_form, config.vocab_size, config.embedding_width, element)
    if config.stored_parameters is not None:
        return _counted_ledger(config, element, head)
    if isinstance(config, RecurrentConfig | EncoderDecoderConfig):
        return _listed_ledger(config, element, partial(linear, _ANY_LAYER), head)
    hidden, layers = config.hidden_size, config.num_layers
    query, kv = config.query_size, config.kv_size
    names = [f"model.layers.{layer}." for layer in range(layers)]
    shapes = attention_shapes(config)
    of_attention = _ATTENTION[-1:] * len(shapes) if config.attention_matrices else _ATTENTION
    attention = sum(
        linear(f"{name}self_attn.{part}", outputs, inputs)
        for name in names
        for part, (outputs, inputs) in zip(of_attention, shapes, strict=True)
    )
    attention += layers * element * ((query + 2 * kv) * config.qkv_bias + hidden * config.attention_out_bias)
    gates = 1 if config.mlp_gated else 0

    def mlp(name: str, inner: int, *, bias: bool, parts: tuple[str, str, str] = _MLP) -> int:
        gate, up, down = (f"{name}{part}" for part in parts)
        matrices = gates * linear(gate, inner, hidden) + linear(up, inner, hidden) + linear(down, hidden, inner)
        return matrices + element * ((1 + gates) * inner + hidden) * bias

    norms = (layers * config.norms_per_layer + 1) * hidden * (1 + config.norm_bias)
    norms += layers * 2 * config.head_dim * config.qk_norm + config.other_parameters
    ledger = {
        "embedding": config.vocab_size * config.embedding_width * element,
        "attention": attention,
        "MLP": sum(mlp(f"{name}mlp.", config.intermediate_size, bias=config.mlp_bias) for name in names),
        "norms": norms * element,
        "LM head": head,
    }
    if isinstance(config, MoEConfig):
        routing = (config.num_experts * hidden + config.router_parameters) * element
        ledger["MLP"] = ledger["experts"] = 0
        for name, is_sparse in zip(names, config.sparse_layers, strict=True):
            if not is_sparse:
                ledger["MLP"] += mlp(f"{name}mlp.", config.intermediate_size, bias=config.mlp_bias)
                continue
            if config.shared_intermediate_size:
                shared = f"{name}{config.shared_name}."
                ledger["MLP"] += mlp(shared, config.shared_intermediate_size, bias=config.mlp_bias)
            # The experts of a layer are alike, unless the files say otherwise.
            inner, bias = config.moe_intermediate_size, config.expert_bias
            kinds = config.num_experts if stored is not None and stored.held else 1
            experts = sum(
                mlp(name, inner, bias=bias, parts=_expert_names(config.expert_names, expert)) for expert in range(kinds)
            )
            ledger["experts"] += config.num_experts // kinds * experts + routing
    return ledger


def _expert_names(names: tuple[str, str, str], expert: int) -> tuple[str, str, str]:
    """Gate, up and down of another expert than the first."""
    gate, up, down = (name.replace(".0.", f".{expert}.") for name in names)
    return gate, up, down


def _listed_ledger(
    config: RecurrentConfig | EncoderDecoderConfig, element: int, linear: Callable[[int, int], int], head: int
) -> dict[str, int]:
    outer = config.vocab_size * config.hidden_size * element
    parts = {
        name: sum(count * linear(outputs, inputs) for outputs, inputs, count in part.matrices)
        + part.others * element
        + part.wide * DTYPE_BYTES["float32"]
        for name, part in config.weights.items()
    }
    return {"embedding": outer, **parts, "LM head": head}


def attention_shapes(config: ModelConfig) -> list[tuple[int, int]]:
    """(outputs, inputs) of every linear layer of an attention."""
    hidden, query, kv = config.hidden_size, config.query_size, config.kv_size
    return list(config.attention_matrices) or [(query, hidden), (kv, hidden), (kv, hidden), (hidden, query)]


def linear_shapes(config: ModelConfig) -> list[tuple[int, int]]:
    """(outputs, inputs) of every linear layer, the LM head and routed experts aside."""
    if config.stored_parameters is not None:
        return list(config.stored_linears)
    if isinstance(config, RecurrentConfig | EncoderDecoderConfig):
        parts = [matrix for part in config.weights.values() for matrix in part.matrices]
        return [(outputs, inputs) for outputs, inputs, count in parts for _ in range(count)]
    hidden = config.hidden_size

    def mlp(inner: int) -> list[tuple[int, int]]:
        return [(inner, hidden)] * (2 if config.mlp_gated else 1) + [(hidden, inner)]

    shapes = attention_shapes(config) * config.num_layers
    if not isinstance(config, MoEConfig):
        return shapes + mlp(config.intermediate_size) * config.num_layers
    sparse = sum(config.sparse_layers)
    shared = mlp(config.shared_intermediate_size) if config.shared_intermediate_size else []
    return shapes + mlp(config.intermediate_size) * (config.num_layers - sparse) + shared * sparse


def num_parameters(config: ModelConfig) -> int:
    """Weights of the network, a tied LM head counted once."""
    return sum(weight_ledger(dataclasses.replace(config, quantization=None), "float32").values()) // 4

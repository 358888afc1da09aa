"""What a network's weights take, from its configuration alone. Free of torch: planners use it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from functools import partial

from quire_interfaces import ConfigError
from quire_models.config import ModelConfig
from quire_models.config_fields import DTYPE_BYTES
from quire_models.shards import split_outputs
from quire_models.spec import ANY_EXPERT, Weight
from quire_models.stored_linears import is_router

__all__ = ["WEIGHT_BYTES", "linear_shapes", "num_parameters", "weight_ledger"]


def _int4_bytes(group_size: int, out_features: int, in_features: int, dtype_bytes: int) -> int:
    # Whole pieces of 128 inputs; a scale per group for whole blocks of 16 outputs.
    groups = -(-in_features // group_size)
    return out_features * -(-in_features // 128) * 64 + -(-out_features // 16) * 16 * groups * dtype_bytes


def _byte_bytes(group_size: int, out_features: int, in_features: int, dtype_bytes: int) -> int:
    return out_features * in_features + -(-out_features // 16) * 16 * -(-in_features // group_size) * dtype_bytes


WEIGHT_BYTES: dict[str, Callable[[int, int, int], int]] = {
    "plain": lambda out_features, in_features, dtype_bytes: out_features * in_features * dtype_bytes,
    "int8": lambda out_features, in_features, dtype_bytes: out_features * (in_features + dtype_bytes),
    "w8a8": lambda out_features, in_features, dtype_bytes: out_features * (in_features + dtype_bytes) + 4,
    "w8a8-g64": partial(_byte_bytes, 64),
    "int4": partial(_int4_bytes, 128),
    "int4-g64": partial(_int4_bytes, 64),
    "int4-g32": partial(_int4_bytes, 32),
    "fp8": partial(_byte_bytes, 128),
    "ptpc_fp8": partial(_byte_bytes, 128),
    "mxfp8": partial(_byte_bytes, 32),
}
"""Linear method -> (outputs, inputs, bytes of a number in the compute dtype) -> bytes of a weight as the method keeps
it."""


def _counted_ledger(
    config: ModelConfig, element: int, head: int, num_ranks: int, linear: Callable[[str, int, int], int]
) -> dict[str, int]:
    """For a network of which only the number of its weights is known, and the shapes of its linear layers.

    Args:
        linear: (name of a layer, outputs, inputs) -> bytes of its weight as it is kept.
    """
    assert config.stored_parameters is not None
    embedding = config.vocab_size * config.hidden_size * element
    towers = _tower_bytes(config, element)
    whole_head = embedding if head else 0
    layers = config.stored_parameters * element - embedding - whole_head - sum(towers.values())
    for name, (outputs, inputs) in config.stored_linears.items():
        if is_router(name) and (config.quantization is None or config.quantization.of_layer(name) is None):
            continue  # it stays as it is
        sizes = None if num_ranks == 1 else split_outputs(outputs, num_ranks)
        layers += linear(name, outputs if sizes is None else sizes[0], inputs) - outputs * inputs * element
    layers = max(0, layers)
    return {"embedding": embedding, "attention": 0, "MLP": layers, "norms": 0, "LM head": head, **towers}


def _tower_bytes(config: ModelConfig, element: int) -> dict[str, int]:
    """The row of towers and connectors; empty for a language model alone."""
    media = config.media
    if media is None:
        return {}
    size = media.num_parameters * element
    if size and media.tower is not None and media.linear_method != "plain":
        kept_as = WEIGHT_BYTES[media.linear_method]
        for outputs, inputs in ((linear.out_features, linear.in_features) for linear in media.tower.linears()):
            size += kept_as(outputs, inputs, element) - outputs * inputs * element
    return {"towers": size}


def weight_ledger(
    config: ModelConfig, dtype: str, linear_method: str = "plain", *, num_ranks: int = 1,
    in_blocks: frozenset[str] = frozenset(),
) -> dict[str, int]:  # fmt: skip
    """Part of the network -> bytes of its weights.

    Args:
        config: The network.
        dtype: What it runs in: "float32", "bfloat16" or "float16".
        linear_method: How linear layers and the LM head keep their weights; the others keep theirs as they are.
        num_ranks: Tensor-parallel ranks, of which this is the first; `config` is then the rank's (`sharding.shard`).
        in_blocks: Names of `BLOCK_BYTES` that the device has an op for (`block_linear`).

    Raises:
        ConfigError: there is no such method.
    """
    if linear_method not in WEIGHT_BYTES:
        raise ConfigError(
            f"there is no linear method {linear_method!r}; choose one of {', '.join(WEIGHT_BYTES)}",
            field="quantization",
        )
    element, kept = DTYPE_BYTES[dtype], WEIGHT_BYTES[linear_method]
    of_head = kept if config.is_native else WEIGHT_BYTES["plain"]  # Transformers' own heads stay as they are
    stored = None if config.quantization is None else dataclasses.replace(config.quantization, in_blocks=in_blocks)

    def linear(name: str, outputs: int, inputs: int) -> int:
        return kept(outputs, inputs, element) if stored is None else stored.bytes_of(name, outputs, inputs, element)

    # A tied head shares the embedding, but in another form it is a copy of its own.
    is_shared = config.tie_word_embeddings and not config.has_own_head and of_head is WEIGHT_BYTES["plain"]
    head_form = None if stored is None else stored.of_head("lm_head", tied=is_shared)
    head_sizes = None if num_ranks == 1 else split_outputs(config.vocab_size, num_ranks)
    head_outputs = config.vocab_size if head_sizes is None else head_sizes[0]  # and as many rows of the embedding
    width = config.network.embedding.size
    head = 0 if is_shared or not config.network.has_lm_head else of_head(head_outputs, width, element)
    if stored is not None and head_form is not None and config.network.has_lm_head:
        head = stored.bytes_as(head_form, head_outputs, width, element)
    if config.stored_parameters is not None:
        return _counted_ledger(config, element, head, num_ranks, linear)
    ledger = {"embedding": head_outputs * width * element, "attention": 0, "MLP": 0}
    if stored is not None:
        name = ".".join(filter(None, (config.network.body, config.network.embedding.name)))
        ledger["embedding"] = stored.table_bytes(name, head_outputs, width, element)
    for weight in config.network.weights():
        if num_ranks > 1:
            weight = _of_first_rank(weight, num_ranks)
        size = 0 if weight.is_buffer else _weight_bytes(weight, linear, element, has_files=bool(stored and stored.held))
        if weight.is_float8 and stored is not None:
            size = math.prod(weight.shape)
        ledger[weight.part] = ledger.get(weight.part, 0) + size
    ledger["LM head"] = ledger.pop("LM head", 0) + head
    return {**ledger, **_tower_bytes(config, element)}


def _of_first_rank(weight: Weight, num_ranks: int) -> Weight:
    """A parameter as the first of some tensor-parallel ranks has it: a linear layer's part, others whole."""
    if not weight.is_linear or weight.is_whole or ANY_EXPERT in weight.name:
        return weight
    sizes = split_outputs(weight.shape[0], num_ranks)
    return weight if sizes is None else weight._replace(shape=(sizes[0], *weight.shape[1:]))


def _weight_bytes(weight: Weight, linear: Callable[[str, int, int], int], element: int, *, has_files: bool) -> int:
    """Bytes of a parameter, of all experts where each has one.

    Args:
        linear: (name of the layer, outputs, inputs) -> bytes of its matrix.
        element: Bytes of a number in the compute dtype.
        has_files: The files say how each matrix is stored, so that experts may differ.
    """
    if not weight.is_linear:
        return weight.num_experts * math.prod(weight.shape) * (DTYPE_BYTES["float32"] if weight.is_wide else element)
    name, (outputs, inputs) = weight.name.removesuffix(".weight"), weight.shape
    kinds = weight.num_experts if has_files else 1
    matrices = (linear(name.replace(ANY_EXPERT, str(expert)), outputs, inputs) for expert in range(kinds))
    return weight.num_experts // kinds * sum(matrices)


def linear_shapes(config: ModelConfig) -> list[tuple[int, int]]:
    """(outputs, inputs) of every linear layer, the LM head and routed experts aside."""
    if config.stored_parameters is not None:
        return list(config.stored_linears.values())
    weights = (each for each in config.network.weights() if each.is_linear and each.num_experts == 1)
    return [(each.shape[0], each.shape[1]) for each in weights]


def num_parameters(config: ModelConfig) -> int:
    """Weights of the network, a tied LM head counted once."""
    media = None if config.media is None else dataclasses.replace(config.media, linear_method="plain")
    plain = dataclasses.replace(config, quantization=None, media=media)
    return sum(weight_ledger(plain, "float32").values()) // 4

"""Routed experts returned with outputs: what goes with `enable_return_routed_experts`. Importing this module loads no
torch."""

from __future__ import annotations

from typing import Any

from quire.config import QuireConfig
from quire_interfaces import ConfigError, FullAttentionSpec, LatentAttentionSpec
from quire_models.config import ModelConfig
from quire_models.feed_forward_spec import SparseMoESpec

__all__ = ["check_routed_experts", "keeps_all_tokens", "sparse_layers"]

FIELD = "enable_return_routed_experts"
_TIERS = "tiers keep keys and values without the experts of their tokens; leave it out"


def check_routed_experts(config: QuireConfig, model: ModelConfig) -> None:
    """Refuse what does not go with `enable_return_routed_experts`, by name.

    Raises:
        ConfigError: a setting that brings tokens without their experts, or a model that has none.
    """
    layers = sparse_layers(model)
    parallel, transfer = config.parallel, config.kv_transfer
    specs = model.network.kv_cache_specs(config.kv_cache.block_size, "float32").values() if model.is_native else ()
    refusals = {
        "model": (
            not model.is_native or not layers,
            f"{model.architecture} "
            + ("has no routed experts" if model.is_native else "runs through Transformers, whose routers are not asked")
            + "; leave it out",
        ),
        "kv_cache": (
            bool(layers) and not any(map(keeps_all_tokens, specs)),
            f"experts are kept where the cache keeps all tokens, and no layer of {model.architecture} attends to all",
        ),
        "pipeline_parallel_size": (
            parallel.pipeline_parallel_size > 1,
            "each stage routes tokens in its own layers; share the model by tensor_parallel_size instead",
        ),
        "decode_context_parallel_size": (
            parallel.decode_context_parallel_size > 1,
            "tokens of the cache are interleaved over ranks; take tensor_parallel_size alone",
        ),
        "eagle_topk": (
            config.speculative.eagle_topk > 1,
            "tokens of a tree of drafts are moved between slots; set it to 1",
        ),
        "kv_disk_path": (transfer.kv_disk_path is not None, _TIERS),
        "kv_offloading_size": (bool(transfer.kv_offloading_size), _TIERS),
        "kv_tier": (transfer.kv_tier is not None, _TIERS),
        "kv_transfer_config": (transfer.connector.kv_connector is not None, _TIERS),
    }
    for field, (is_set, reason) in refusals.items():
        if is_set:
            raise ConfigError(f"{field} does not go with {FIELD}: {reason}", field=field)
    if len({layer.num_chosen for layer in layers}) > 1:
        raise ConfigError(
            f"model does not go with {FIELD}: layers of {model.architecture} choose different numbers of experts",
            field="model",
        )


def sparse_layers(model: ModelConfig) -> list[SparseMoESpec]:
    """The layers with routed experts, in order."""
    parts = (layer.feed_forward for layer in model.network.layers)
    return [part for part in parts if isinstance(part, SparseMoESpec)]


def keeps_all_tokens(spec: Any) -> bool:
    """Whether a layer's cache (`quire_interfaces.KVCacheSpec`) keeps every token of a request while it runs."""
    return type(spec) in (FullAttentionSpec, LatentAttentionSpec)

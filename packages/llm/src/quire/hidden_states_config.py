"""Hidden states written to files: what goes with `extract_hidden_states`. Importing this module loads no torch."""

from __future__ import annotations

from quire.config import QuireConfig
from quire_interfaces import ConfigError
from quire_models.config import ModelConfig

__all__ = ["check_extraction"]

FIELD = "extract_hidden_states"
_CACHED = "states of tokens that are found there are not computed"


def check_extraction(config: QuireConfig, model: ModelConfig) -> None:
    """Refuse what does not go with `extract_hidden_states`, by name.

    Raises:
        ConfigError: a setting that keeps tokens from being computed, or a model whose layers are not shown.
    """
    parallel, transfer, layers = config.parallel, config.kv_transfer, config.runner.extract_hidden_states_layers
    tiers = ("kv_offloading_size", "kv_disk_path", "kv_tier")
    refusals = {
        "extract_hidden_states_layers": (
            not layers,
            "say which layers, e.g. --extract-hidden-states-layers 2 14 25 28",
        ),
        "enable_prefix_caching": (
            config.kv_cache.enable_prefix_caching,
            f"{_CACHED}; turn it off (--no-enable-prefix-caching)",
        ),
        **{tier: (bool(getattr(transfer, tier)), f"{_CACHED}; leave it out") for tier in tiers},
        "kv_transfer_config": (transfer.connector.kv_connector is not None, f"{_CACHED}; leave it out"),
        "speculative_method": (
            config.speculative.method != "none",
            "a step shows its layers to one reader; leave speculation out",
        ),
        "enable_return_routed_experts": (config.model.enable_return_routed_experts, "each runs layers its own way"),
        "tensor_parallel_size": (parallel.num_ranks > 1, "it works on one device; use more engines instead"),
        "model": (
            not model.is_native or not model.generates or not model.network.has_one_stream,
            f"{model.architecture} does not show the hidden states of its layers",
        ),
    }
    for field, (is_set, reason) in refusals.items():
        if is_set:
            raise ConfigError(f"{field} does not go with {FIELD}: {reason}", field=field)
    if len(set(layers)) < len(layers) or not 0 <= min(layers) <= max(layers) <= model.num_layers:
        raise ConfigError(
            f"extract_hidden_states_layers must be different layers from 0 to {model.num_layers}, which stands for "
            f"what comes out of the last one, got {layers}",
            field="extract_hidden_states_layers",
        )

"""What is known of a model and its cache once they are loaded, as the labels of metrics."""

from __future__ import annotations

from quire import QuireConfig
from quire.parallel.data_parallel import engine_ranks
from quire_engine import EngineInfo
from quire_observability import EngineMetrics

__all__ = ["label_metrics"]


def label_metrics(metrics: EngineMetrics, model_name: str, config: QuireConfig, info: EngineInfo) -> None:
    """Names the model and the engine in every sample, and tells the cache's settings (`cache_config_info`)."""
    metrics.set_labels(model_name=model_name, engine=str(engine_ranks(config.data_parallel).first))
    metrics.set_cache_config(
        block_size=info.block_size,
        num_gpu_blocks=info.num_blocks,
        cache_dtype=info.kv_cache_dtype,
        enable_prefix_caching=config.kv_cache.enable_prefix_caching,
        prefix_caching_hash_algo=config.kv_cache.prefix_caching_hash_algo,
        gpu_memory_utilization=config.model.gpu_memory_utilization,
    )

"""Decode context parallelism: what does not go with a KV cache that is interleaved over ranks. Loads no torch."""

from __future__ import annotations

from quire.config import QuireConfig
from quire_interfaces import ConfigError
from quire_models.config import ModelConfig
from quire_models.sharding import interleave

__all__ = ["check_context_parallel"]


def check_context_parallel(config: QuireConfig, model: ModelConfig) -> None:
    """Refuse what does not go with `decode_context_parallel_size`, by name.

    Raises:
        ConfigError: a setting, or a model, that needs all tokens of a block on one rank.
    """
    size = config.parallel.decode_context_parallel_size
    if size == 1:
        return
    tp, network, media = config.parallel.tensor_parallel_size, model.network, model.media
    refusals = {
        "tensor_parallel_size": (tp % size != 0, f"it must be a multiple of that, and is {tp}; change one of them"),
        "block_size": (
            config.kv_cache.block_size % size != 0,
            f"it must divide a block's {config.kv_cache.block_size} tokens, a power of two; take another number of "
            "ranks, or larger blocks",
        ),
        "eagle_topk": (
            config.speculative.eagle_topk > 1,
            "tokens of a tree of drafts are moved between slots, which are on several ranks; set it to 1",
        ),
        "model": (
            model.max_encoder_len > 0 or not model.is_native or interleave(network, size) == network,
            f"{model.architecture} has no attention of a decoder to all tokens before that ranks could share",
        ),
        "language_model_only": (
            media is not None and media.is_bidirectional,
            f"tokens of an image see one another in {model.architecture}; set it to true to serve text alone",
        ),
    }
    for field, (is_set, reason) in refusals.items():
        if is_set:
            raise ConfigError(f"{field} does not go with decode_context_parallel_size {size}: {reason}", field=field)

"""Pipeline parallelism: what stages cannot do yet.

Knows settings and plans; importing this module loads no torch.
"""

from __future__ import annotations

from quire.config import QuireConfig
from quire_interfaces import ConfigError
from quire_models.config import ModelConfig
from quire_models.stages import stage_layers, stage_refusal

__all__ = ["check_stages"]


def check_stages(config: QuireConfig, model: ModelConfig) -> None:
    """Refuse what stages cannot do yet, by name.

    Raises:
        ConfigError: a setting, or a model, that goes with one stage only.
    """
    size = config.parallel.pipeline_parallel_size
    refusals = {
        "nnodes": (config.hosts.nnodes > 1, "stages are processes of one host so far; leave it out"),
        "distributed_executor_backend": (
            config.parallel.distributed_executor_backend == "ray",
            "stages are processes of one host so far; take mp",
        ),
        "speculative_method": (
            config.speculative.method not in ("none", "ngram", "suffix"),
            f"{config.speculative.method} drafts with a network, which no stage has; take ngram, suffix or none",
        ),
        "enable_prompt_embeds": (config.media.enable_prompt_embeds, "stages read token ids; leave it out"),
        "runner": (
            config.model.runner == "pooling" or config.model.convert in ("embed", "classify", "reward"),
            "stages generate; serve embeddings and scores with one stage",
        ),
    }
    for field, (is_set, reason) in refusals.items():
        if is_set:
            raise ConfigError(f"{field} does not go with pipeline_parallel_size {size}: {reason}", field=field)
    if reason := stage_refusal(model):
        raise ConfigError(f"model does not go with pipeline_parallel_size {size}: {reason}", field="model")
    stage_layers(model.network, size)  # refuses more stages than layers

"""Pipeline parallelism: how many steps are on their way through the stages, and what stages cannot do yet.

Knows settings and plans; importing this module loads no torch.
"""

from __future__ import annotations

import os

from quire.config import QuireConfig
from quire_interfaces import ConfigError
from quire_models.config import ModelConfig
from quire_models.stages import stage_layers, stage_refusal

__all__ = ["check_stages", "num_steps_in_flight"]


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


def num_steps_in_flight(config: QuireConfig) -> int:
    """Number of steps that are on their way through the stages at once, each with its share of the requests: as many as
    there are cores for, at most one for each stage. Where the stages have the same cores, that is one: then a step
    takes all requests, and reads the weights once for them.

    Args:
        config: Settings of each rank (`config_of_ranks`).
    """
    parallel = config.parallel
    num_ranks = parallel.tensor_parallel_size * config.data_parallel.data_parallel_size
    num_threads = num_ranks * (config.runner.num_threads or 1)
    return max(1, min(parallel.pipeline_parallel_size, len(os.sched_getaffinity(0)) // num_threads))

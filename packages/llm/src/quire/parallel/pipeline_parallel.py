"""Pipeline parallelism: how many steps are on their way through the stages, where drafts are made, and which networks
have no stages.

Knows settings and plans; importing this module loads no torch.
"""

from __future__ import annotations

import dataclasses
import os
from typing import TYPE_CHECKING, cast

from quire.config import QuireConfig
from quire.draft_plan import DraftPlan
from quire_interfaces import ConfigError
from quire_interfaces.platforms import platform_of
from quire_models.config import ModelConfig
from quire_models.stages import stage_refusal
from quire_spec_decode import HEAD_METHODS

if TYPE_CHECKING:
    from quire.parallel.rank_groups import RankGroups
    from quire_models import Network
    from quire_models.layers.stage_lm import StageLM

__all__ = ["check_stages", "num_steps_in_flight", "tap_stage", "with_table_at_end"]


def check_stages(config: QuireConfig, model: ModelConfig) -> None:
    """Refuse a model that cannot be cut into so many stages.

    Raises:
        ConfigError: its layers need more than what the stage before gives, or there are too few.
    """
    size = config.parallel.pipeline_parallel_size
    if reason := stage_refusal(model, size):
        raise ConfigError(f"model does not go with pipeline_parallel_size {size}: {reason}", field="model")


def with_table_at_end(config: QuireConfig, model: ModelConfig) -> ModelConfig:
    """The model, of which the last stage has the table of tokens, too, where what drafts there reads it."""
    if config.speculative.method not in HEAD_METHODS:
        return model
    return dataclasses.replace(model, network=dataclasses.replace(model.network, last_stage_embeds=True))


def tap_stage(network: Network, groups: RankGroups, draft: DraftPlan | None) -> DraftPlan | None:
    """Have a stage hand on what the network that drafts reads of it.

    Returns:
        What drafts here, which is the last stage.
    """
    if draft is None:
        return None
    cast("StageLM", network).tapped_layers = tuple(sorted(draft.feature_layers))
    return draft if groups.mesh.is_last_stage else None


def num_steps_in_flight(config: QuireConfig) -> int:
    """Number of steps that are on their way through the stages at once, each with its share of the requests: as many as
    there are cores for, at most one for each stage. Where the stages have the same cores, that is one: then a step
    takes all requests, and reads the weights once for them. Hosts are taken to have as many cores as this one. Stages
    on accelerators have one each.

    Args:
        config: Settings of each rank (`config_of_ranks`).
    """
    parallel, num_engines = config.parallel, config.data_parallel.data_parallel_size
    if not platform_of(config.runner.device).is_host:
        return parallel.pipeline_parallel_size
    num_threads = num_engines * parallel.tensor_parallel_size * (config.runner.num_threads or 1)
    num_cores = len(os.sched_getaffinity(0)) * config.hosts.nnodes
    return max(1, min(parallel.pipeline_parallel_size, num_cores // num_threads))

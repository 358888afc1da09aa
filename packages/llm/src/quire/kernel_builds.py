"""Where packages that tune or compile kernels look for what they have built, and what they compile while steps run.
Importing this module loads no torch.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from quire.config import QuireConfig
from quire_interfaces import SchedulerStats

if TYPE_CHECKING:
    from quire.parallel.rank_groups import RankGroups
    from quire_runner import ModelRunner

__all__ = ["agreement_of", "use_kernel_tables", "use_kernels", "watch_kernels"]

_logger = logging.getLogger(__name__)


def use_kernel_tables(config: QuireConfig) -> None:
    """Let every package that tunes kernels look into the configured folder first."""
    if config.runner.kernel_tables is not None:
        from quire_ops import kernel_builders

        for builder in kernel_builders():
            builder.use_tables(Path(config.runner.kernel_tables))


def use_kernels(config: QuireConfig) -> None:
    """Let packages that tune or compile kernels look into the configured folders first."""
    use_kernel_tables(config)
    if config.runner.kernel_cache is not None:
        from quire_ops import kernel_builders

        for builder in kernel_builders():
            builder.use(Path(config.runner.kernel_cache))


def agreement_of(groups: RankGroups | None) -> Callable[[bool], bool] | None:
    """What ranks that share a network decide by about each graph (`ModelRunner.warm_up`); None for one rank alone. They
    have a clock and a memory each, and must all capture the same."""
    if groups is None:
        return None
    if (ranks := groups.tp) is None:
        return lambda own: own

    def agree(own: bool) -> bool:
        import torch

        return bool(ranks.all_gather(torch.tensor([own], dtype=torch.uint8), dim=0).all())

    return agree


def watch_kernels(
    runner: ModelRunner, capture_s: float, agree: Callable[[bool], bool] | None
) -> Callable[[SchedulerStats], None]:
    """Have everything compiled that steps need, capture graphs (`ModelRunner.warm_up`), then count what is compiled
    nevertheless.

    Raises:
        Exception: Of ranks that share a network, what the steps raised: the others may wait for this one in them.
    """
    from quire_ops import kernel_builders

    try:
        runner.warm_up(capture_s, agree)
    except Exception:
        if agree is not None:
            raise
        _logger.exception("the rehearsal of steps failed; kernels are compiled when they are first needed")
    builders = kernel_builders()
    for builder in builders:
        builder.count_compilations()

    def add_stats(stats: SchedulerStats) -> None:
        for builder in builders:
            stats.jit_compilations_total |= builder.count_compilations()

    return add_stats

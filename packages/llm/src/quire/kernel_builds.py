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
    from quire_runner import ModelRunner

__all__ = ["capture_time_s", "use_kernel_tables", "use_kernels", "watch_kernels"]

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


def capture_time_s(config: QuireConfig) -> float | None:
    """Seconds of the start in which a rank captures graphs. None where ranks share the network: each has a clock of its
    own, and all must capture the same graphs."""
    return config.runner.cuda_graph_capture_s if config.parallel.num_ranks == 1 else None


def watch_kernels(runner: ModelRunner, capture_s: float | None) -> Callable[[SchedulerStats], None]:
    """Have everything compiled that steps need, capture graphs for up to `capture_s` seconds (None: what
    `ModelRunner.warm_up` says), then count what is compiled nevertheless."""
    from quire_ops import kernel_builders

    try:
        runner.warm_up(capture_s)
    except Exception:
        _logger.exception("the rehearsal of steps failed; kernels are compiled when they are first needed")
    builders = kernel_builders()
    for builder in builders:
        builder.count_compilations()

    def add_stats(stats: SchedulerStats) -> None:
        for builder in builders:
            stats.jit_compilations_total |= builder.count_compilations()

    return add_stats

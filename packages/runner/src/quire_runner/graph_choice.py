"""Whether decode steps are captured in graphs, and why not. Decided once, when a runner is made."""

from __future__ import annotations

from quire_interfaces.platforms import platform_of
from quire_runner.config import RunnerConfig
from quire_runner.graphs import CaptureStep, GraphCapture

__all__ = ["choose_capture"]


def choose_capture(
    capture: CaptureStep | None, network: object, config: RunnerConfig
) -> tuple[CaptureStep | None, str | None]:
    """What captures, or why nothing does.

    Args:
        capture: What was asked for; None takes the device's own way.
        network: The network. One that does not say what in it reads lengths on the host (`host_lengths`) is taken to.
    """
    if config.enforce_eager:
        return None, "enforce_eager is set"
    platform = platform_of(config.device)
    if capture is None and not platform.has_graphs:
        return None, f"device {platform.name} has none"
    readers = getattr(network, "host_lengths", ("the network",))
    if readers:
        return None, f"lengths are read on the host by {', '.join(readers)}"
    if capture is None:
        if (reason := platform.refusal()) is not None:
            return None, reason
        capture = GraphCapture(platform.runtime())
    return capture, None

"""Whether decode steps are captured in graphs, and why not. Decided once, when a runner is made."""

from __future__ import annotations

import torch

from quire_runner.config import RunnerConfig
from quire_runner.graphs import CaptureStep, CudaCapture

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
    device = torch.device(config.device)
    if capture is None and device.type != "cuda":
        return None, f"device {device.type} has none"
    readers = getattr(network, "host_lengths", ("the network",))
    if readers:
        return None, f"lengths are read on the host by {', '.join(readers)}"
    if capture is None:
        if not torch.cuda.is_available():
            return None, "torch finds no GPU"
        capture = CudaCapture()
    return capture, None

"""`torch_device`: what torch calls the device that a setting names."""

from __future__ import annotations

import torch

from quire_interfaces import ConfigError
from quire_interfaces.platforms import platform_of

__all__ = ["torch_device"]


def torch_device(device: str) -> torch.device:
    """The device of torch for a name of `--device`, or for "meta".

    Raises:
        ConfigError: No platform has the name, or the number is none.
    """
    try:
        return torch.device(device if device == "meta" else platform_of(device).torch_device(device))
    except RuntimeError as error:
        raise ConfigError(f"device must be a platform, or one with a number, got {device!r}", field="device") from error

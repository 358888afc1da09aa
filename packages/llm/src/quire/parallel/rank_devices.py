"""Which device each rank of an engine has: one of its own, counted from the engine's first on each host. Importing this
module loads no torch.
"""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys

from quire.available_memory import available_memory_bytes
from quire.config import QuireConfig
from quire_interfaces import ConfigError
from quire_interfaces.platforms import platform_of

__all__ = ["device_number", "devices_of_host", "free_bytes_of_ranks", "num_ranks_of_host", "on_device_of_rank"]

_FREE_BYTES = """
import json, sys
sys.path.extend(json.loads(sys.argv[1]))
from quire.available_memory import available_memory_bytes
print(json.dumps([available_memory_bytes(device) for device in sys.argv[2:]]))
"""


def num_ranks_of_host(config: QuireConfig) -> int:
    """How many ranks of an engine a host has."""
    return config.parallel.num_ranks // config.hosts.nnodes


def device_number(device: str) -> int:
    """Number of a device as a setting names it: 1 of "cuda:1", 0 of "cuda"."""
    number = device.partition(":")[2]
    return int(number) if number.isdigit() else 0


def devices_of_host(config: QuireConfig) -> list[str]:
    """Devices of an engine's ranks on a host, in the order of the ranks: the one that the settings name (the first,
    where they give no number) and those behind it; the same for all on the CPU."""
    device, num_ranks = config.runner.device, num_ranks_of_host(config)
    platform = platform_of(device)
    if platform.is_host or num_ranks == 1:
        return [device] * num_ranks
    first = device_number(device)
    return [f"{platform.name}:{first + rank}" for rank in range(num_ranks)]


def on_device_of_rank(config: QuireConfig, rank: int) -> QuireConfig:
    """The settings of a rank, with the device that it has.

    Args:
        config: Settings of all ranks; their device is that of the first rank of each host.
        rank: Number of the rank in the engine.
    """
    device = devices_of_host(config)[rank % num_ranks_of_host(config)]
    return dataclasses.replace(config, runner=dataclasses.replace(config.runner, device=device))


def free_bytes_of_ranks(config: QuireConfig) -> int:
    """Memory that each rank of this host can plan with: the least that one of their devices has free. Asked by another
    process where there are several: whoever asks a GPU takes some of its memory until it ends.

    Raises:
        ConfigError: This host has fewer devices, or they do not say how much is free.
    """
    devices = devices_of_host(config)
    if len(set(devices)) == 1:
        return available_memory_bytes(devices[0])
    _check_number(config, devices)
    command = [sys.executable, "-c", _FREE_BYTES, json.dumps(sys.path), *devices]
    asked = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    if asked.returncode:
        lines = asked.stderr.strip().splitlines() or [f"exit status {asked.returncode}"]
        raise ConfigError(
            f"devices {', '.join(devices)} do not say how much memory is free: {lines[-1]}", field="device"
        )
    free: list[int] = json.loads(asked.stdout.splitlines()[-1])
    return min(free)


def _check_number(config: QuireConfig, devices: list[str]) -> None:
    platform = platform_of(config.runner.device)
    if not platform.module or platform.refusal() is not None:
        return  # who is asked for memory says so
    there = platform.runtime().device_count()
    if device_number(devices[-1]) >= there:
        parallel = config.parallel
        hosts = f" over {config.hosts.nnodes} hosts" if config.hosts.nnodes > 1 else ""
        raise ConfigError(
            f"tensor_parallel_size {parallel.tensor_parallel_size} times pipeline_parallel_size "
            f"{parallel.pipeline_parallel_size}{hosts} takes {len(devices)} devices here, {devices[0]} to "
            f"{devices[-1]}, and there are {there}: take fewer ranks, or an earlier --device",
            field="tensor_parallel_size",
        )

"""How much memory an engine's ranks can plan with. Importing this module loads no torch."""

from __future__ import annotations

import json
import subprocess
import sys

from quire.available_memory import available_memory_bytes
from quire.config import QuireConfig
from quire.parallel.tensor_parallel import device_number, devices_of_host, ranks_of_host
from quire_interfaces import ConfigError
from quire_interfaces.platforms import platform_of

__all__ = ["free_bytes_of_ranks", "memory_of_rank"]

_FREE_BYTES = """
import json, sys
sys.path.extend(json.loads(sys.argv[1]))
from quire.available_memory import available_memory_bytes
print(json.dumps([available_memory_bytes(device) for device in sys.argv[2:]]))
"""


def memory_of_rank(config: QuireConfig, free_bytes: int | None = None) -> int:
    """Of this host's free memory what a rank has, taken for all stages together: ranks of one host share it, and
    stages of several hosts have as much on each. Of accelerators, each rank has one of its own, with so much free.

    Args:
        config: Settings.
        free_bytes: What is free; None for what is free now.
    """
    if free_bytes is None:
        free_bytes = free_bytes_of_ranks(config)
    if not platform_of(config.runner.device).is_host:
        return free_bytes * config.parallel.pipeline_parallel_size
    sharers, num_stages = ranks_of_host(config)
    return free_bytes * config.parallel.pipeline_parallel_size // (num_stages * sharers)


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

"""Platforms: what a kind of device has, and what it is asked by. `Platform` is the seam for hardware.

The CPU, CUDA and ROCm are here; others are plug-ins, entry points of the group `quire.platforms` whose value is a
`Platform` of the entry point's name (docs/plugins.md). Free of torch, because planners and the server's process ask,
too: what needs torch is behind `Platform.runtime`.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import Any

from quire_interfaces.errors import ConfigError
from quire_interfaces.plugins import installed_plugins, not_allowed_hint

__all__ = ["CPU", "CUDA", "GROUP", "PLATFORMS", "ROCM", "Platform", "platform_of", "platform_of_type"]

GROUP = "quire.platforms"


@dataclass(frozen=True, slots=True, kw_only=True)
class Platform:
    """A kind of device."""

    name: str
    """What `--device` says, alone or before the number of a device: "cuda:1"."""
    device_type: str
    """Type of its tensors' devices, as torch names it."""
    module: str = ""
    """Module in the manner of `torch.cuda`: `Stream`, `Event`, `stream`, `current_stream`, `synchronize`, `set_device`,
    `mem_get_info`, `device_count`, `get_device_properties`, `is_available`, and of its allocator `memory_allocated`,
    `memory_reserved`, `max_memory_allocated`. Importing it makes the device type known to torch. Empty where work is
    done when a call returns, as on the CPU."""
    has_graphs: bool = False
    """The module captures graphs, too: `CUDAGraph`, `graph`, `graph_pool_handle`."""
    pins_memory: bool = False
    """Copies from pinned memory of the host go on beside the computation."""
    dtypes: tuple[str, ...] = ("bfloat16", "float32", "float16")
    """What networks may run in; the first is taken for a checkpoint in another dtype."""
    attention_backend: str | None = None
    """Name of the attention backend to take where no setting says one; None for the best of all that there are."""
    distributed_backend: str = "gloo"
    """What torch.distributed sends its tensors with."""

    @property
    def is_host(self) -> bool:
        """Its tensors lie in the host's memory, and its work is done by the host's threads."""
        return self.device_type == "cpu"

    def runtime(self) -> Any:
        """The module; only of platforms that have one. Imports torch."""
        return import_module(self.module)

    def refusal(self) -> str | None:
        """Why it cannot be used in this process; None where it can. Imports torch."""
        return None if not self.module or self.runtime().is_available() else f"torch finds no device {self.name!r} here"

    def torch_device(self, device: str) -> str:
        """What torch calls the device that a setting names: "rocm:1" is "cuda:1"."""
        if self.module:
            self.runtime()
        return self.device_type if self.is_host else self.device_type + device.removeprefix(self.name)

    def use(self, device: str) -> None:
        """Have kernels of this thread run on the device that a setting names by number. Each thread that computes must
        call it: what is launched without a device, as Triton's kernels are, goes to the thread's own."""
        if self.module and ":" in device:
            self.runtime().set_device(int(device.partition(":")[2]))

    def free_bytes(self, device: str) -> int | None:
        """Memory of the device that a setting names that new allocations can take now; None for the host's.

        Raises:
            ConfigError: There is no such device.
        """
        return self._own_free_bytes(device) if self.module else None

    def _own_free_bytes(self, device: str) -> int:
        if (reason := self.refusal()) is not None:
            raise ConfigError(f"{reason}; use --device cpu", field="device")
        try:
            free: int = self.runtime().mem_get_info(self.torch_device(device))[0]
        except (RuntimeError, ValueError, AssertionError) as error:
            raise ConfigError(
                f"device {device!r} does not say how much memory is free: {error}; the devices are {self.name}:0 to "
                f"{self.name}:{self.runtime().device_count() - 1}",
                field="device",
            ) from error
        return free

    def devices(self) -> dict[str, str]:
        """Device -> what it is, of all that are here; empty without a module, or without devices. Imports torch."""
        if self.refusal() is not None or not self.module:
            return {}
        count = self.runtime().device_count()
        return {f"{self.name}:{index}": self._described(index) for index in range(count)}

    def description(self, device: str) -> str:
        """What the device that a setting names is, in the words of `devices`; "not here" for one that is not among
        them."""
        return self.devices().get(device if ":" in device else f"{device}:0", "not here")

    def _described(self, index: int) -> str:
        properties = self.runtime().get_device_properties(index)
        facts = [properties.name, f"{properties.total_memory / 2**30:.1f} GiB"]
        if hasattr(properties, "multi_processor_count"):
            facts.append(f"{properties.multi_processor_count} processors")
        if hasattr(properties, "major"):
            facts.append(f"capability {properties.major}.{properties.minor}")
        return ", ".join(facts)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Rocm(Platform):
    """AMD's GPUs, which torch calls "cuda" where it is built for them."""

    def refusal(self) -> str | None:
        """Why there is none: the build of torch is for another vendor's, or there is no device."""
        torch = import_module(self.module.partition(".")[0])
        if torch.version.hip is None:
            return "this build of torch is not for AMD GPUs"
        return Platform.refusal(self)


_GPU: dict[str, Any] = {
    "device_type": "cuda",
    "module": "torch.cuda",
    "has_graphs": True,
    "pins_memory": True,
    "distributed_backend": "nccl",  # RCCL has that name in torch, too
}
CPU = Platform(name="cpu", device_type="cpu")
CUDA = Platform(name="cuda", **_GPU)
"""NVIDIA's GPUs, and AMD's by the name that torch gives them."""
ROCM = _Rocm(name="rocm", **_GPU)

PLATFORMS = {each.name: each for each in (CPU, CUDA, ROCM)}
"""Those that are not plug-ins."""

_of_types = {each.device_type: each for each in (CPU, CUDA)}
"""Type of a tensor's device -> platform; plug-ins join when they are first named."""


def platform_of(device: str) -> Platform:
    """The platform of a device as `--device` names it: "cpu", "cuda:1".

    Raises:
        ConfigError: There is none of this name, or a plug-in that is broken.
    """
    return PLATFORMS.get(device.partition(":")[0]) or _platform_of_plugin(device)


def _platform_of_plugin(device: str) -> Platform:
    name = device.partition(":")[0]
    plugins = installed_plugins(GROUP)
    if name not in plugins:
        raise ConfigError(
            f"device must be one of {', '.join((*PLATFORMS, *plugins))}, or one of them with a number (cuda:1), got "
            f"{device!r}; platforms of other devices are plug-ins ({GROUP}){not_allowed_hint(GROUP, name)}",
            field="device",
        )
    platform: Platform = plugins[name].load(Platform, field="device")
    if platform.name != name:
        raise plugins[name].error(f"must have the name of its entry point, and is called {platform.name!r}")
    return _of_types.setdefault(platform.device_type, platform) if not platform.is_host else platform


def platform_of_type(device_type: str) -> Platform:
    """The platform of tensors, by the type of their device. What no platform knows (torch's "meta") is taken for one
    that has nothing of its own, as the CPU."""
    return _of_types.get(device_type, CPU)

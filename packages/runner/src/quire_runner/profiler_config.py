"""Settings of the profiler of steps, in the JSON form of vLLM's `--profiler-config`. Free of torch."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from quire_interfaces.errors import ConfigError
from quire_interfaces.settings import Settings, at_least, one_of, setting

__all__ = ["ProfilerConfig", "complaint_about_profiler"]

_SWITCH = one_of(True, False)


def _not_absolute(value: Any) -> str | None:
    return None if value == "" or (isinstance(value, str) and value.startswith("/")) else "be an absolute path"


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfilerConfig(Settings):
    """Which profiler, and what it records.

    Raises:
        ConfigError: a value is not possible.
    """

    profiler: str | None = setting(
        None,
        help="torch writes traces of PyTorch's profiler; cuda tells Nsight Systems when to record.",
        check=one_of(None, "torch", "cuda"),
    )
    torch_profiler_dir: str = setting("", help="Folder of the traces, on the host of each rank.", check=_not_absolute)
    torch_profiler_with_stack: bool = setting(True, help="Record the Python stack.", check=_SWITCH)
    torch_profiler_with_flops: bool = setting(False, help="Estimate the FLOPs of operators.", check=_SWITCH)
    torch_profiler_use_gzip: bool = setting(True, help="Compress traces.", check=_SWITCH)
    torch_profiler_dump_cuda_time_total: bool = setting(
        True, help="Write a table of the operators beside each trace.", check=_SWITCH
    )
    torch_profiler_record_shapes: bool = setting(False, help="Record shapes of tensors.", check=_SWITCH)
    torch_profiler_with_memory: bool = setting(False, help="Record what is allocated and freed.", check=_SWITCH)
    ignore_frontend: bool = setting(
        True, help="Of vLLM; API processes have no torch and are never profiled.", check=_SWITCH
    )
    torch_profiler_layer_tree: bool = setting(
        False, help="Write a tree of functions and operators with their times beside each trace.", check=_SWITCH
    )
    delay_iterations: int = setting(0, help="Steps after the start before recording begins.", check=at_least(0))
    max_iterations: int = setting(0, help="Most steps that are recorded; 0 for no bound.", check=at_least(0))

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> ProfilerConfig:
        """Configuration from the members of the JSON object.

        Raises:
            ConfigError: an unknown member (with the nearest known one), a value that is not possible, or no folder.
        """
        names = [spec.name for spec in fields(cls)]
        if unknown := sorted(set(values).difference(names)):
            nearest = difflib.get_close_matches(unknown[0], names, n=1)
            hint = f"did you mean {nearest[0]!r}?" if nearest else f"there are {', '.join(names)}"
            raise ConfigError(f"profiler_config has no member {unknown[0]!r}; {hint}", field="profiler_config")
        config = cls(**values)
        if config.profiler == "torch" and not config.torch_profiler_dir:
            raise ConfigError(
                "profiler_config with profiler torch needs torch_profiler_dir, the folder of the traces",
                field="profiler_config",
            )
        if config.torch_profiler_layer_tree and not config.torch_profiler_with_stack:
            raise ConfigError(
                "profiler_config with torch_profiler_layer_tree needs torch_profiler_with_stack, which the tree is "
                "made of",
                field="profiler_config",
            )
        return config


def complaint_about_profiler(value: Any) -> str | None:
    """What is wrong with the setting `profiler_config`; None where nothing is."""
    if value is None:
        return None
    if not isinstance(value, dict):
        return "be a JSON object"
    try:
        ProfilerConfig.of(value)
    except ConfigError as error:
        return f"be right in all its members ({error})"
    return None

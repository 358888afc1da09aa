"""What an operator may set about adapters. Free of torch. The names are vLLM's."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from quire_interfaces import ConfigError, Settings, at_least, between, one_of, setting

__all__ = ["LoraConfig", "adapter_bytes"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraConfig(Settings):
    """Adapters of a served model."""

    enable_lora: bool | None = setting(
        None,
        help="Whether requests may choose LoRA adapters; empty where lora_modules names some, and for the demo model, "
        "which brings two.",
    )
    lora_modules: tuple[str, ...] = setting(
        (),
        help="Adapters to load at the start, each as name=folder or as JSON with name and path; requests choose them "
        "by name as their model.",
    )
    default_mm_loras: dict[str, str] | None = setting(  # noqa: RUF009 (its default is None)
        None,
        help="Adapters of requests with media that choose none, as JSON: modality -> folder, e.g. "
        '{"image": "my-model/vision-lora"}; such an adapter is offered under its folder\'s name.',
    )
    max_loras: int = setting(
        8, help="Adapters that one step may use: slots on the device.", unit="adapters", check=between(1, 1024)
    )
    max_lora_rank: int = setting(
        16, help="Largest rank of an adapter; memory is set aside for it.", unit="ranks", check=between(1, 512)
    )
    lora_dtype: str = setting(
        "auto",
        help="Data type of adapters on the device: auto for that of the activations, fp8_e4m3 or int8 for half of its "
        "memory or less. Adapters that are stored so stay as they are; others are rounded, with a scale for each row.",
        check=one_of("auto", "fp8_e4m3", "int8"),
    )
    max_cpu_loras: int = setting(
        32,
        help="Adapters kept in host memory; the least recently used one is dropped, and read again when asked for.",
        unit="adapters",
        check=at_least(1),
    )
    lora_merge_after: int = setting(
        0,
        help="Put an adapter into the network's own weights when it has had the whole batch to itself for so many "
        "steps, until another request comes; 0 for never. Saves time with small networks; takes memory for another "
        "copy of the weights, and tokens of requests with adapters come to depend on what else runs.",
        unit="steps",
        check=at_least(0),
    )

    def default_adapters(self) -> dict[str, str]:
        """Modality -> name of the adapter of `default_mm_loras`."""
        return {modality: Path(folder).name for modality, folder in (self.default_mm_loras or {}).items()}

    def adapters(self) -> dict[str, str]:
        """Name -> folder of each of `lora_modules` and `default_mm_loras`.

        Raises:
            ConfigError: one is not of the form name=folder, or a name comes twice.
        """
        found: dict[str, str] = {}
        for entry in self.lora_modules:
            name, folder = _name_and_folder(entry)
            if name in found:
                raise ConfigError(f"lora_modules names the adapter {name!r} twice", field="lora_modules")
            found[name] = folder
        return {**{Path(folder).name: folder for folder in (self.default_mm_loras or {}).values()}, **found}


def _name_and_folder(entry: str) -> tuple[str, str]:
    """An adapter given as name=folder, or in vLLM's JSON, of which other members are about its models."""
    if entry.lstrip().startswith("{"):
        try:
            given = json.loads(entry)
        except ValueError as error:
            raise ConfigError(
                f"lora_modules holds {entry!r}, which is not JSON: {error}", field="lora_modules"
            ) from None
        name, folder = given.get("name"), given.get("path")
    else:
        name, _, folder = entry.partition("=")
    if not (isinstance(name, str) and isinstance(folder, str) and name and folder):
        raise ConfigError(
            f'lora_modules must hold name=folder or {{"name": ..., "path": ...}}, got {entry!r}', field="lora_modules"
        )
    return name, folder


def adapter_bytes(shapes: Iterable[tuple[int, int]], config: LoraConfig, dtype_bytes: int) -> int:
    """Bytes of all slots.

    Args:
        shapes: (outputs, inputs) of every linear layer that adapters may change.
        config: Number of slots, and their rank.
        dtype_bytes: Of the network's dtype.
    """
    rank, is_narrow = config.max_lora_rank, config.lora_dtype != "auto"
    per_slot = sum(
        rank * (outputs + inputs) * (1 if is_narrow else dtype_bytes)
        + 8 * outputs
        + (4 * (rank + outputs) if is_narrow else 0)
        for outputs, inputs in shapes
    )
    return per_slot * config.max_loras

"""What to say when a plan does not fit: the ledger with the flags behind each line, and the settings that would fit.

Every value that is advised has been planned with: it fits by itself, the other settings as they are.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from quire.config import LONGEST_THAT_FITS, QuireConfig
from quire_interfaces import ConfigError

__all__ = ["flags_of", "format_bytes", "ledger_lines", "ways_to_fit"]

Fits = Callable[[QuireConfig], bool]

LINE_FLAGS = {
    "weights: draft": "--speculative-quantization",
    "weights: towers": "--mm-encoder-quantization, --language-model-only",
    "weights": "--quantization, --dtype",
    "activations": "--max-num-batched-tokens, --max-model-len, --max-num-seqs",
    "drafts of recurrent layers": "--num-speculative-tokens, --max-num-seqs",
    "rows": "--max-num-seqs, --max-model-len",
    "graphs": "--cuda-graph-sizes, --enforce-eager",
    "embeddings of media": "--encoder-cache-size, --max-model-len, --language-model-only",
    "adapters": "--max-loras, --max-lora-rank, --no-enable-lora",
    "weights without the adapter in them": "--lora-merge-after",
    "KV cache": "--max-model-len, --kv-cache-dtype, --kv-cache-memory-bytes",
}
"""Beginning of a line of the ledger -> flags that make it smaller."""

SEARCHED = (
    ("model", "max_model_len", 16),
    ("scheduler", "max_num_seqs", 1),
    ("scheduler", "max_num_batched_tokens", 16),
    ("model", "kv_cache_memory_bytes", 1 << 16),
    ("model", "num_gpu_blocks_override", 2),
)
"""(section, field, smallest value that is worth to be advised) of numbers whose largest that fits is looked for."""

TRIED = (
    ("model", "quantization", ("int8", "int4")),
    ("model", "kv_cache_dtype", ("fp8",)),
)
"""(section, field, values) of which the first that fits is advised."""


def format_bytes(size: float) -> str:
    """Bytes for people, e.g. "1.19 GB"."""
    for unit in ("B", "kB", "MB", "GB", "TB", "PB"):
        if abs(size) < 1000:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.2f} {unit}"
        size /= 1000
    return f"{size:.2f} EB"


def ledger_lines(ledger_bytes: Mapping[str, int]) -> list[str]:
    """The ledger, weights in one line, with the flags that make each line smaller."""
    merged: dict[str, int] = {}
    for what, size in ledger_bytes.items():
        is_part = what.startswith("weights: ") and what != "weights: draft"
        name = "weights" if is_part else what
        merged[name] = merged.get(name, 0) + size
    return [f"  {what:<36}{format_bytes(size):>11}  {flags_of(what)}".rstrip() for what, size in merged.items() if size]


def flags_of(what: str) -> str:
    """Flags that make a line of the ledger smaller."""
    if what in LINE_FLAGS:
        return LINE_FLAGS[what]
    return next((flags for start, flags in LINE_FLAGS.items() if what.startswith(start)), "")


def ways_to_fit(config: QuireConfig, fits: Fits, *, max_model_len: int, is_plain: bool) -> list[str]:
    """Flags of which each alone would make the plan fit, with the largest values that do.

    Args:
        config: The settings that do not fit.
        fits: Whether others do.
        max_model_len: The context that was planned with.
        is_plain: Whether weights are unquantized, so that they could be.
    """
    ways = []
    for section, field, least in SEARCHED:
        current = getattr(getattr(config, section), field)
        if field == "max_model_len":
            current = None if current == LONGEST_THAT_FITS else max_model_len
        if current is None:
            continue
        largest = _largest(_fits_with(fits, config, section, field), least, current)
        if largest is not None:
            ways.append(f"--{field.replace('_', '-')} {largest} (it is {current})")
    ways += _shares(config, fits)
    for section, field, values in TRIED:
        is_open = is_plain if field == "quantization" else getattr(config.model, field) == "auto"
        fitting = [value for value in values if is_open and _fits_with(fits, config, section, field)(value)]
        ways += [f"--{field.replace('_', '-')} {value}" for value in fitting[:1]]
    if config.model.kv_cache_memory_bytes is not None or config.model.num_gpu_blocks_override is not None:
        unsized = dataclasses.replace(config.model, kv_cache_memory_bytes=None, num_gpu_blocks_override=None)
        if _holds(fits, lambda: dataclasses.replace(config, model=unsized)):
            ways.append("no size for the KV cache (it then takes what is free)")
    return ways


def _shares(config: QuireConfig, fits: Fits) -> list[str]:
    """The smallest --gpu-memory-utilization that is enough."""
    if config.model.kv_cache_memory_bytes is not None or config.model.num_gpu_blocks_override is not None:
        return []
    share = config.model.gpu_memory_utilization
    for percent in range(5 * (int(share * 100) // 5 + 1), 100, 5):
        if _fits_with(fits, config, "model", "gpu_memory_utilization")(percent / 100):
            return [f"--gpu-memory-utilization {percent / 100:g} (it is {share:g})"]
    return []


def _fits_with(fits: Fits, config: QuireConfig, section: str, field: str) -> Callable[[Any], bool]:
    return lambda value: _holds(fits, lambda: _with(config, section, field, value))


def _largest(fits: Callable[[int], bool], least: int, most: int) -> int | None:
    """The largest whole number from `least` that fits and is less than `asked`, to 1 % and rounded down to something
    readable; None where none does. Smaller ones may be too small: it is sought from above."""
    high = most
    low = high // 2
    while low >= least and not fits(low):
        low, high = low // 2, low
    if low < least:
        if high <= least or not fits(least):
            return None
        low = least
    while high - low > max(1, low // 128):
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    rounded = low - low % 10 ** max(0, len(str(low)) - 3)
    return rounded if rounded >= least and fits(rounded) else low


def _holds(fits: Fits, make_config: Callable[[], QuireConfig]) -> bool:
    """Whether settings fit that may not even go together."""
    try:
        return fits(make_config())
    except ConfigError:
        return False


def _with(config: QuireConfig, section: str, field: str, value: Any) -> QuireConfig:
    """The settings with one field replaced, in every section that has it.

    Raises:
        ConfigError: the value does not go with the others.
    """
    sections: dict[str, Any] = {section: dataclasses.replace(getattr(config, section), **{field: value})}
    if field == "max_model_len":
        sections["scheduler"] = dataclasses.replace(config.scheduler, max_model_len=value)
    return dataclasses.replace(config, **sections)

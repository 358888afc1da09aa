"""Adapters: read from PEFT's files, kept on the host, placed in slots of the device, applied to their tokens.

Importing this package loads no torch: names are looked up on first use (PEP 562), so that a planning process can read
`LoraConfig` alone.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from quire_lora.adapter import Adapter
    from quire_lora.config import LoraConfig, adapter_bytes
    from quire_lora.merging import HotAdapter
    from quire_lora.peft import read_adapter
    from quire_lora.peft_config import PeftConfig
    from quire_lora.runtime import AdapterRuntime
    from quire_lora.slots import AdapterSlots, ExpertSite, LinearSite
    from quire_lora.store import AdapterStore

__version__ = "0.1.0"

__all__ = [
    "Adapter",
    "AdapterRuntime",
    "AdapterSlots",
    "AdapterStore",
    "ExpertSite",
    "HotAdapter",
    "LinearSite",
    "LoraConfig",
    "PeftConfig",
    "adapter_bytes",
    "read_adapter",
]

_MODULE_OF = {
    "Adapter": "adapter",
    "AdapterRuntime": "runtime",
    "AdapterSlots": "slots",
    "AdapterStore": "store",
    "ExpertSite": "slots",
    "HotAdapter": "merging",
    "LinearSite": "slots",
    "LoraConfig": "config",
    "PeftConfig": "peft_config",
    "adapter_bytes": "config",
    "read_adapter": "peft",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

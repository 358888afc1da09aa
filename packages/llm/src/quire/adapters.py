"""Which adapters an engine serves, and what keeps them. Importing this module loads no torch."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from quire.config import QuireConfig
from quire_interfaces import ConfigError, QuireError
from quire_models.hub import resolve_model

if TYPE_CHECKING:
    from quire_lora import AdapterStore
    from quire_models import Network

__all__ = ["adapter_folder", "offered_adapters", "open_adapters", "takes_adapters"]


def takes_adapters(config: QuireConfig) -> bool:
    """Whether requests may choose adapters: as set, or where the model is the demo model, which brings some.

    Raises:
        ConfigError: adapters are named although they are switched off.
    """
    if config.lora.enable_lora is not None:
        if config.lora.adapters() and not config.lora.enable_lora:
            raise ConfigError("adapters are named, but enable_lora is off; set it", field="enable_lora")
        return config.lora.enable_lora
    return config.model.model is None or bool(config.lora.adapters())


def offered_adapters(config: QuireConfig) -> dict[str, str]:
    """Name -> folder of each adapter that is there from the start; empty where none are served."""
    if not takes_adapters(config):
        return {}
    folders: dict[str, str] = {}
    if config.model.model is None:
        from quire_demo_model import adapter_paths

        folders = {name: str(path) for name, path in adapter_paths().items()}
    return folders | config.lora.adapters()


def adapter_folder(config: QuireConfig, place: str) -> Path:
    """Folder of an adapter: as it is, or downloaded from the hub. Raises CheckpointError when there is none."""
    return resolve_model(place, modelscope=config.model.use_modelscope)


def open_adapters(config: QuireConfig, network: Network, offered: Mapping[str, str]) -> AdapterStore | None:
    """The store of a network's adapters with those that are offered in it; None where none are served.

    Raises:
        CheckpointError: one cannot be read or does not fit.
    """
    if network.adapters is None:
        return None
    from quire_lora import AdapterStore

    store = AdapterStore(
        network.adapters,
        network.parameter_tensors,
        max_adapters=config.lora.max_cpu_loras,
        resolve=partial(adapter_folder, config),
    )
    try:
        for name, place in offered.items():
            store.load(name, place).result()
    except QuireError:
        store.close()
        raise
    return store

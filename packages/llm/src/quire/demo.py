"""What comes with the embedded demo model and makes it see. Importing this module loads no torch."""

from __future__ import annotations

import dataclasses
from importlib.util import find_spec

from quire.config import QuireConfig
from quire_demo_model import vision_paths

__all__ = ["seeing_demo"]


def seeing_demo(config: QuireConfig) -> QuireConfig:
    """The settings with the demo model's towers and the adapter for images, where the demo model is served and nothing
    else is said about towers and adapters; without Transformers, which prepares images, the settings as they are.
    """
    model, lora = config.model, config.lora
    is_open = model.model is None and model.mmproj is None and lora.default_mm_loras is None
    if not is_open or model.language_model_only or lora.enable_lora is False or find_spec("transformers") is None:
        return config
    towers, adapter = vision_paths()
    return dataclasses.replace(
        config,
        model=dataclasses.replace(model, mmproj=str(towers)),
        lora=dataclasses.replace(lora, default_mm_loras={"image": str(adapter)}),
    )

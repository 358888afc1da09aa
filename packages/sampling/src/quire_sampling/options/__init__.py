"""All sampler options, found in the modules of this package: a new one is a new module, which nothing else names."""

from __future__ import annotations

import pkgutil
from importlib import import_module
from typing import Any

from quire_sampling.option import EditOption, FilterOption, SamplerOption, TemperatureOption, TokenOption

__all__ = ["EDITS", "FILTERS", "OPTIONS", "TEMPERATURES", "TOKENS"]


def _find_options() -> tuple[SamplerOption[Any], ...]:
    modules = sorted(module.name for module in pkgutil.iter_modules(__path__))
    return tuple(option for name in modules for option in import_module(f"{__name__}.{name}").OPTIONS)


OPTIONS = _find_options()
EDITS = tuple(sorted((each for each in OPTIONS if isinstance(each, EditOption)), key=lambda option: option.stage))
"""In the order in which they act."""
TEMPERATURES = tuple(each for each in OPTIONS if isinstance(each, TemperatureOption))
FILTERS = tuple(each for each in OPTIONS if isinstance(each, FilterOption))
"""In the order in which they act, that of their names."""
TOKENS = tuple(each for each in OPTIONS if isinstance(each, TokenOption))

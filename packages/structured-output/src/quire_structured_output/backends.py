"""The backends by name. Libraries are imported when a backend is made: an engine that needs none pays for none."""

from __future__ import annotations

import importlib.util

from quire_interfaces import ConfigError, GrammarBackend
from quire_structured_output.vocabulary import Vocabulary

__all__ = ["BACKENDS", "make_backend", "resolve_backend"]

BACKENDS = {"llguidance": "llguidance", "outlines": "outlines_core"}
"""Name -> the library it needs."""


def resolve_backend(name: str) -> str:
    """The backend that a setting means.

    Raises:
        ConfigError: there is no such backend, or its library is not installed.
    """
    name = "llguidance" if name == "auto" else name
    if name not in BACKENDS:
        raise ConfigError(
            f"there is no structured output backend {name!r}; there are {', '.join(BACKENDS)}",
            field="structured_output_backend",
        )
    if importlib.util.find_spec(BACKENDS[name]) is None:
        raise ConfigError(
            f"structured_output_backend {name!r} needs the library {BACKENDS[name]}, which is not installed: install "
            f"quire-structured-output[{name}], or choose another backend",
            field="structured_output_backend",
        )
    return name


def make_backend(name: str, vocabulary: Vocabulary) -> GrammarBackend:
    """A backend for one vocabulary; with a large one this takes a second.

    Raises:
        ConfigError: as `resolve_backend`.
    """
    if resolve_backend(name) == "outlines":
        from quire_structured_output.outlines_backend import OutlinesBackend

        return OutlinesBackend(vocabulary)
    from quire_structured_output.llguidance_backend import LLGuidanceBackend

    return LLGuidanceBackend(vocabulary)

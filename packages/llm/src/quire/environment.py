"""Settings from environment variables: QUIRE_ and the setting's name. Says which such names nobody knows.

Knows the names, not the values' types. An unknown name is a warning, not an error: clusters put variables of their own
making into every container (Kubernetes sets QUIRE_SERVICE_HOST wherever there is a service called "quire").
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Mapping

from quire.setting_fields import ConfigField, config_fields
from quire_interfaces.plugins import ALLOWED_VARIABLE, installed_plugins

__all__ = [
    "ENVIRONMENT",
    "OTHER_VARIABLES",
    "SETTINGS_GROUP",
    "environment_values",
    "unknown_variables",
    "variable_of",
    "warn_unknown_variables",
]

PREFIX = "QUIRE_"

ENVIRONMENT = "environment"
"""The source of settings that came from environment variables."""

VLLM_VARIABLES = {"api_key": "VLLM_API_KEY"}
"""Settings -> variables of vLLM's that are read where there is none of ours: a server that was closed stays closed."""

SETTINGS_GROUP = "quire.settings"
"""Entry points of installed packages that have settings of their own: name -> a `Settings` class."""

OTHER_VARIABLES = {
    ALLOWED_VARIABLE: "packages or entry points of other packages that may be used, with commas between; default: all",
    "QUIRE_CPU_KERNELS": "CPU kernels: amx, avx512bf16, avx512vnni, avx512, avx2, none, or a path; default: the best",
    "XDG_CACHE_HOME": "folder below which GGUF files get a folder of their own; ~/.cache by default",
    "QUIRE_REQUIRE_BROWSER": "tests: fail instead of skipping when there is no browser to test the chat page with",
    "QUIRE_SCREENSHOTS": "tests: folder for pictures of the chat page",
}
"""Variables that are no settings -> what reads them."""


def environment_values(fields: Mapping[str, ConfigField], environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """Setting -> text, of those that the environment sets.

    Args:
        fields: The settings (`quire.setting_fields.config_fields`).
        environ: None takes this process's environment.
    """
    environ = os.environ if environ is None else environ
    variables = {name: variable_of(spec, environ) for name, spec in fields.items()}
    return {name: environ[variable] for name, variable in variables.items() if variable in environ}


def variable_of(spec: ConfigField, environ: Mapping[str, str] | None = None) -> str:
    """The variable that a setting is read from: ours, unless only vLLM's is there."""
    environ = os.environ if environ is None else environ
    other = VLLM_VARIABLES.get(spec.name)
    return other if other is not None and other in environ and spec.env not in environ else spec.env


def unknown_variables(fields: Mapping[str, ConfigField], environ: Mapping[str, str] | None = None) -> list[str]:
    """One sentence per variable that looks like ours and has no effect, with the nearest known name.

    Args:
        fields: The settings of the program that starts; those of other installed packages are known, too.
        environ: None takes this process's environment.
    """
    environ = os.environ if environ is None else environ
    known_names = {spec.env for spec in fields.values()} | OTHER_VARIABLES.keys()
    strange = sorted(name for name in environ if name.upper().startswith(PREFIX) and name not in known_names)
    if not strange:
        return []
    known_names |= _variables_of_other_packages()
    return [_complaint(name, known_names) for name in strange if name not in known_names]


def warn_unknown_variables(fields: Mapping[str, ConfigField]) -> None:
    """Log `unknown_variables` of this process as warnings of the logger "quire"."""
    complaints = unknown_variables(fields)
    if complaints:
        import logging

        for complaint in complaints:
            logging.getLogger("quire").warning(complaint)


def _complaint(name: str, known_names: set[str]) -> str:
    short = {each.removeprefix(PREFIX): each for each in sorted(known_names)}
    nearest = difflib.get_close_matches(name.upper().removeprefix(PREFIX), short, n=1, cutoff=0.5)
    hint = f"did you mean {short[nearest[0]]}?" if nearest else "`quire explain` lists all settings"
    return f"quire: the environment variable {name} is not known and has no effect; {hint}"


def _variables_of_other_packages() -> set[str]:
    sections = {name: plugin.load(type) for name, plugin in installed_plugins(SETTINGS_GROUP).items()}
    return {spec.env for spec in config_fields(sections).values()}

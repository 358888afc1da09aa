"""Logits processors by name: those of a program in Python, and those that `logits_processors` names, of other packages.

A name is that of an entry point of the group `quire.logits_processors`, or says what to import, `package.module:name`.
What it names is a `LogitsProcessor`, or a class of them, made without arguments. Requests choose by the same name.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from importlib import import_module

from quire_interfaces import ConfigError, LogitsProcessor
from quire_interfaces.plugins import installed_plugins, not_allowed_hint

__all__ = ["GROUP", "named_processors"]

GROUP = "quire.logits_processors"
_FIELD = "logits_processors"


def named_processors(
    names: Sequence[str], given: Mapping[str, LogitsProcessor] | None
) -> Mapping[str, LogitsProcessor] | None:
    """Name -> processor.

    Args:
        names: As `logits_processors` has them.
        given: Those of the program in Python.

    Raises:
        ConfigError: There is none of a name, or it cannot be loaded, or is no processor.
    """
    return given if not names else {**{name: _load(name) for name in names}, **(given or {})}


def _load(name: str) -> LogitsProcessor:
    found = _imported(name) if ":" in name else _plugin(name)
    if not inspect.isclass(found):
        return found
    try:
        processor: LogitsProcessor = found()
    except Exception as error:
        raise _error(f"{name!r} cannot be made without arguments: {type(error).__name__}: {error}") from error
    return _checked(name, processor)


def _plugin(name: str) -> LogitsProcessor:
    plugins = installed_plugins(GROUP)
    if name not in plugins:
        raise _error(
            f"{name!r} is not installed (entry points {GROUP}: {', '.join(plugins) or 'none'}); install it, or "
            f"give package.module:name{not_allowed_hint(GROUP, name)}"
        )
    processor: LogitsProcessor = plugins[name].load(field=_FIELD)
    return processor


def _imported(path: str) -> LogitsProcessor:
    module, _, name = path.partition(":")
    try:
        found: LogitsProcessor = getattr(import_module(module), name)
    except Exception as error:
        raise _error(f"{path!r} cannot be imported: {type(error).__name__}: {error}") from error
    return _checked(path, found)


def _checked(name: str, found: LogitsProcessor) -> LogitsProcessor:
    if not callable(found):
        raise _error(f"{name!r} must be something to call with token ids, their number and logits, not {found!r}")
    return found


def _error(what: str) -> ConfigError:
    return ConfigError(f"logits_processors: {what}", field=_FIELD)

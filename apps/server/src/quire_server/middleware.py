"""`--middleware`: ASGI layers of the operator's around the whole app, by import path."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Sequence
from typing import Any

from starlette.middleware.base import BaseHTTPMiddleware
from starlette.types import ASGIApp

from quire_interfaces import ConfigError

__all__ = ["load_middleware", "with_middleware"]


def load_middleware(path: str) -> Any:
    """The class or coroutine function of an import path, `package.module.name`.

    Raises:
        ConfigError: there is none, or it is neither.
    """
    module, _, name = path.rpartition(".")
    try:
        found = getattr(importlib.import_module(module), name)
    except Exception as error:
        raise ConfigError(
            f"middleware {path!r} cannot be imported: {type(error).__name__}: {error}; give package.module.name of "
            "what is in PYTHONPATH",
            field="middleware",
        ) from None
    if not (inspect.isclass(found) or inspect.iscoroutinefunction(found)):
        raise ConfigError(
            f"middleware {path!r} must be an ASGI class, or a coroutine function of a request and what answers it, not "
            f"of type {type(found).__name__}",
            field="middleware",
        )
    return found


def with_middleware(app: ASGIApp, paths: Sequence[str]) -> ASGIApp:
    """The app inside these layers, of which the last one is the outermost, as in vLLM.

    Raises:
        ConfigError: as `load_middleware`.
    """
    for path in paths:
        layer = load_middleware(path)
        is_function = inspect.iscoroutinefunction(layer)
        app = BaseHTTPMiddleware(app, dispatch=layer) if is_function else layer(app)
    return app

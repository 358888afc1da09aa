"""The server of `quire run`, in a process of its own that ends with the one that started it.

It reads what to serve from standard input, which stays open as a lifeline (`quire_engine.lifeline`).
"""

from __future__ import annotations

import sys
from typing import Any

import msgspec

from quire import QuireConfig
from quire_engine.lifeline import read_spec
from quire_interfaces import QuireError
from quire_server.config import ServerConfig
from quire_server.exit_status import exit_status_of
from quire_server.serve import serve
from quire_server.stopping import stopping_on_signals

__all__ = ["ServedSpec", "main"]


class ServedSpec(msgspec.Struct, kw_only=True):
    """What to serve."""

    config: dict[str, Any]
    server: dict[str, Any]
    factory: tuple[str, dict[str, Any]] | None = None
    """Another engine than the configured one; see `quire_server.serve.serve`."""


def main() -> int:
    """Serve until told to stop; the exit status."""
    with stopping_on_signals() as stopping:
        spec = read_spec(ServedSpec, lambda _: stopping.end_now(0))  # engines see the end of this process likewise
        values: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value for name, value in spec.server.items()
        }
        try:
            return serve(QuireConfig.from_dict(spec.config), ServerConfig(**values), factory=spec.factory)
        except QuireError as error:
            print(f"quire: {error}", file=sys.stderr)
            return exit_status_of(error)

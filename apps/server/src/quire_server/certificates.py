"""`--enable-ssl-refresh`: certificates that change while the server runs."""

from __future__ import annotations

import asyncio
import logging
import os
import ssl
from collections.abc import Sequence

import uvicorn

__all__ = ["refresh_certificate"]

_logger = logging.getLogger(__name__)

REFRESH_S = 1.0
"""How often the files are looked at."""


async def refresh_certificate(config: uvicorn.Config) -> None:
    """Load the files of the certificate again after they changed, into the context of new connections. A pair that does
    not fit yet (one file is written after the other) is tried again; the one before it serves until then."""
    files = [str(name) for name in (config.ssl_certfile, config.ssl_keyfile, config.ssl_ca_certs) if name is not None]
    loaded, complained_of = _versions(files), None
    while True:
        await asyncio.sleep(REFRESH_S)
        versions = _versions(files)
        if versions == loaded or config.ssl is None or config.ssl_certfile is None:
            continue
        try:
            # A context of its own first: one that took half of a pair would serve nobody.
            for context in (ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), config.ssl):
                context.load_cert_chain(config.ssl_certfile, config.ssl_keyfile)
                if config.ssl_ca_certs is not None:
                    context.load_verify_locations(config.ssl_ca_certs)
        except (OSError, ValueError) as error:
            if versions != complained_of:
                _logger.warning("quire: the changed certificate cannot be used: %s; the one before it serves", error)
                complained_of = versions
            continue
        loaded = versions
        _logger.info("Read the certificate again: %s", ", ".join(files))


def _versions(files: Sequence[str]) -> list[tuple[int, int] | None]:
    found: list[tuple[int, int] | None] = []
    for name in files:
        try:
            stat = os.stat(name)
            found.append((stat.st_mtime_ns, stat.st_ino))
        except OSError:
            found.append(None)
    return found

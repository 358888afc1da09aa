"""The log of a server's process, as its settings say: `--log-level`, `--log-format` and `--log-config-file`."""

from __future__ import annotations

import json
import logging.config
from pathlib import Path

from quire_interfaces import ConfigError
from quire_observability import configure_logging
from quire_server.config import ServerConfig

__all__ = ["begin_logging"]


def begin_logging(server: ServerConfig) -> None:
    """Set the log of this process up.

    Raises:
        ConfigError: the file cannot be read, or says nothing that Python's logging understands.
    """
    configure_logging(server.log_level, server.log_format)
    if server.log_config_file is None:
        return
    name = server.log_config_file
    try:
        given = json.loads(Path(name).read_bytes())
        if not isinstance(given, dict):
            raise ValueError("it is no JSON object")
        logging.config.dictConfig(given)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"log_config_file {name!r} cannot be read: {error}", field="log_config_file") from None
    except (ValueError, TypeError, AttributeError, ImportError) as error:
        cause = error.__cause__ or error
        raise ConfigError(
            f"log_config_file {name!r} must hold a JSON object as logging.config.dictConfig takes it: {error}"
            + ("" if cause is error else f" ({cause})"),
            field="log_config_file",
        ) from None

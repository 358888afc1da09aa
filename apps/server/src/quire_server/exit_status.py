"""With what status `quire` ends, by what went wrong. Documented in docs/operations.md, for whoever starts it again."""

from __future__ import annotations

from enum import IntEnum

from quire_interfaces import ConfigError, EngineDeadError, QuireError

__all__ = ["CannotListenError", "EngineStartError", "ExitStatus", "exit_status_of"]


class ExitStatus(IntEnum):
    """Exit status of the process."""

    OK = 0
    """It was asked to stop, or has done what it was asked for."""
    ERROR = 1
    """Anything else, such as a checkpoint that cannot be read."""
    WRONG_SETTING = 2
    """The command line or a setting is wrong: to start it again changes nothing."""
    CANNOT_LISTEN = 3
    """The address is taken, or not ours."""
    ENGINE_NOT_STARTED = 4
    """The engine could not start."""
    ENGINE_DEAD = 5
    """The engine died, and has used up its restarts."""


class CannotListenError(ConfigError):
    """The address is taken, or not ours."""


class EngineStartError(EngineDeadError):
    """The engine could not start."""


def exit_status_of(error: QuireError) -> ExitStatus:
    """The status that tells of an error which ends the process."""
    if isinstance(error, CannotListenError):
        return ExitStatus.CANNOT_LISTEN
    if isinstance(error, ConfigError):
        return ExitStatus.WRONG_SETTING
    if isinstance(error, EngineStartError):
        return ExitStatus.ENGINE_NOT_STARTED
    return ExitStatus.ENGINE_DEAD if isinstance(error, EngineDeadError) else ExitStatus.ERROR

"""What a command of `quire` is, and the table of those that this package has. Only argparse is imported."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

from quire_server.command_line import Parser

if TYPE_CHECKING:
    from quire.config import QuireConfig
    from quire.setting_fields import Origin, Sections

__all__ = [
    "COMMANDS",
    "JSON",
    "MODEL",
    "Argument",
    "Command",
    "ParsedCommand",
    "argument",
    "command",
    "engine_sections",
    "server_sections",
]


class ParsedCommand(NamedTuple):
    """What a command was called with."""

    sections: dict[str, Any]
    """Section -> configuration; empty for a command without settings."""
    origins: dict[str, Origin]
    """Setting -> where its value came from."""
    args: argparse.Namespace
    """Its own arguments."""

    def engine_config(self) -> QuireConfig:
        """The engine's settings."""
        from quire.config import QuireConfig

        return QuireConfig(**{name: each for name, each in self.sections.items() if name != "server"})


class Argument(NamedTuple):
    """An argument of a command's own, as `argparse.ArgumentParser.add_argument` takes it."""

    names: tuple[str, ...]
    options: dict[str, Any]
    is_alternative: bool = False
    """Exactly one of the command's alternatives must be there."""


def argument(*names: str, is_alternative: bool = False, **options: Any) -> Argument:
    """An `Argument` in the words of `add_argument`."""
    return Argument(names, options, is_alternative)


class Command(NamedTuple):
    """One of `quire`'s commands."""

    text: str
    """What it does, in a few words."""
    usage: str
    """What follows its name."""
    sections: Callable[[], Sections] | None
    """The settings that it takes."""
    arguments: tuple[Argument, ...]
    """Its own arguments."""
    run: Callable[[ParsedCommand], int]
    """Runs it; the exit status."""

    def parser(self, name: str) -> Parser:
        """A parser of its own arguments."""
        parser = Parser(f"quire {name}")
        has_alternatives = any(each.is_alternative for each in self.arguments)
        group = parser.add_mutually_exclusive_group(required=True) if has_alternatives else parser
        for each in self.arguments:
            (group if each.is_alternative else parser).add_argument(*each.names, **each.options)
        return parser


COMMANDS: dict[str, Command] = {}
"""Name -> command, in the order in which `quire --help` lists them."""


def server_sections() -> Sections:
    """The engine's settings and the server's."""
    from quire.config import QuireConfig
    from quire_server.config import ServerConfig

    return {**QuireConfig.sections(), "server": ServerConfig}


def engine_sections() -> Sections:
    """The engine's settings."""
    from quire.config import QuireConfig

    return QuireConfig.sections()


def command(
    name: str, text: str, usage: str = "", *arguments: Argument, sections: Callable[[], Sections] | None = None
) -> Callable[[Callable[[ParsedCommand], int]], Callable[[ParsedCommand], int]]:
    """Register a function as a command (`Command`)."""

    def register(function: Callable[[ParsedCommand], int]) -> Callable[[ParsedCommand], int]:
        COMMANDS[name] = Command(text, usage, sections, arguments, function)
        return function

    return register


MODEL = argument("MODEL", nargs="?", help="checkpoint folder or hub name (default: the demo model)")
JSON = argument("--json", action="store_true", dest="as_json", help="machine-readable")

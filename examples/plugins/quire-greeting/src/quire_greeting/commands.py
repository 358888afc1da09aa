"""The command `quire greet NAME`: the smallest plug-in."""

from __future__ import annotations

import argparse
from typing import Any

from quire_greeting.settings import GreetingConfig

__all__ = ["register_greet"]


def register_greet(commands: Any) -> None:
    """Add `greet` to an argparse subparsers object."""
    parser = commands.add_parser("greet", help="say hello")
    parser.add_argument("NAME", help="to whom")
    parser.set_defaults(run=greet)


def greet(args: argparse.Namespace) -> int:
    """Say hello; the exit status."""
    print(f"{GreetingConfig.from_environment().greeting}, {args.NAME}.")
    return 0

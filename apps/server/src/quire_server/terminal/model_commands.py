"""How `quire list`, `rm` and `show` look."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from quire.memory_advice import format_bytes
from quire_interfaces import ConfigError
from quire_server.terminal.local_models import (
    LocalModel,
    chat_template_of,
    facts_of,
    find_local,
    list_models,
    local_path,
    models_as_json,
    removal,
)

__all__ = ["age", "print_list", "remove", "show"]

_AGES = (("year", 365 * 86400), ("month", 30 * 86400), ("day", 86400), ("hour", 3600), ("minute", 60))


def age(seconds: float) -> str:
    """How long ago, for people."""
    for name, length in _AGES:
        count = int(seconds // length)
        if count:
            return f"{count} {name}{'s' if count > 1 else ''} ago"
    return "just now"


def print_list(models_dir: str | None, cache_dir: str | None, *, as_json: bool) -> int:
    """`quire list`; the exit status."""
    models, problems = list_models(models_dir, cache_dir)
    if as_json:
        print(json.dumps(models_as_json(models), indent=2))
    elif not models:
        print("no models here; `quire pull OWNER/NAME` downloads one, `quire run` has one with it")
    else:
        now = time.time()
        rows = [("NAME", "SIZE", "LAST USED", "REVISION")]
        rows += [
            (
                each.name + ("" if each.has_weights else " (no weights)"),
                format_bytes(each.size_bytes),
                age(now - each.last_used_s) if each.last_used_s else "never",
                _revisions(each),
            )
            for each in models
        ]
        widths = [max(len(row[column]) for row in rows) for column in range(4)]
        for row in rows:
            print("  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip())
    for problem in problems:
        print(f"quire: {problem}", file=sys.stderr)
    return 0


def _revisions(model: LocalModel) -> str:
    if model.place == "folder":
        return model.path
    return ", ".join(text[:8] + text[40:] for text in model.revisions)


def remove(names: Sequence[str], models_dir: str | None, cache_dir: str | None, *, asks: bool) -> int:
    """`quire rm`; the exit status, 1 where the user said no.

    Raises:
        ConfigError: a model is not there, or nobody can be asked.
    """
    planned = removal(names, models_dir, cache_dir)
    for line in planned.what:
        print(line)
    if asks:
        if not sys.stdin.isatty():
            raise ConfigError("nobody can be asked here; --yes removes without asking", field="yes")
        try:
            answer = input(f"remove, and free {format_bytes(planned.freed_bytes)}? [y/N] ")
        except EOFError:
            answer = ""
        if answer.strip().lower() not in ("y", "yes"):
            print("nothing was removed")
            return 1
    planned.execute()
    print(f"freed {format_bytes(planned.freed_bytes)}")
    return 0


def show(model: str | None, models_dir: str | None, cache_dir: str | None, *, template: bool, as_json: bool) -> int:
    """`quire show`; the exit status.

    Raises:
        QuireError: it is not here, or its files cannot be read.
    """
    if model is None or Path(model).expanduser().exists():
        local = local_path(model)
    else:
        local = find_local(model, list_models(models_dir, cache_dir)[0])
    if template:
        print(chat_template_of(local))
        return 0
    facts = facts_of(local)
    if as_json:
        print(json.dumps(facts, indent=2))
        return 0
    count = facts["parameters"]
    shown = {**facts, "parameters": f"{count:,}", "size_bytes": format_bytes(facts["size_bytes"])}
    shown["chat_template"] = "yes (--template prints it)" if facts["chat_template"] else "no"
    shown["sampling_defaults"] = ", ".join(f"{name} {value}" for name, value in facts["sampling_defaults"].items())
    shown["revisions"] = ", ".join(facts["revisions"])
    for name, value in shown.items():
        if value not in ("", None):
            print(f"{name.removesuffix('_bytes').replace('_', ' '):<19}{value}")
    return 0

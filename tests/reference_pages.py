"""The reference of settings and of commands; `python tests/reference_pages.py` writes docs/settings.md and
docs/commands.md, and the flags in docs/coming-from-vllm.md.

Everything is read from declarations: settings from the configuration classes (`quire.setting_fields`), groups from
`quire serve --help`, commands from their table and from the packages of this workspace that add some.
"""

from __future__ import annotations

import argparse
import importlib
import re
import tomllib
import types
import typing
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import quire_server.cli  # noqa: F401 - it fills the table of commands
from quire.environment import OTHER_VARIABLES, VLLM_VARIABLES
from quire.setting_fields import ConfigField, Sections, config_fields
from quire.vllm_settings import OTHER_SPELLINGS, VLLM_SETTINGS, VLLMSetting
from quire_server.commands import COMMANDS, Command, server_sections
from quire_server.help_text import GROUPS, default_text, group_of, usage_text

ROOT = Path(__file__).resolve().parents[1]
COMMAND = "python tests/reference_pages.py"

VLLM_BEGIN = f"<!-- written by `{COMMAND}` -->\n"
VLLM_END = "<!-- end of what is written -->\n"
_KINDS = {bool: "on or off", int: "whole number", float: "number", str: "text", dict: "JSON object"}

SETTINGS_HEAD = f"""\
# Settings

<!-- written by `{COMMAND}` from the declarations of the settings -->

Every setting of `quire serve`, in the groups of `quire serve --help`; `quire plan`, `quire explain` and others take
those of the engine, too ([Commands](commands.md)), and `LLM(...)` and `AsyncLLM(...)` take them as keywords by their
names.

- A setting comes from the command line (its flag), the environment (its variable) or a YAML file (its name in the file
  that `--config` names). The command line wins over the environment, and the environment over the file.
- `quire explain NAME` says which value holds, where it came from and what reads it.
- Whole numbers may have a suffix or an exponent: 4k is 4000, 4K is 4096, 1e6; sizes also 512MB and 8GiB.
- An unknown name is an error with the nearest known one. Flags of `vllm serve` that are not listed here are answered:
  [Coming from vLLM](coming-from-vllm.md#flags).

"""

COMMANDS_HEAD = f"""\
# Commands

<!-- written by `{COMMAND}` from the declarations of the commands -->

`quire --help` lists the commands, `quire COMMAND --help` says what one takes, and `quire completion SHELL` prints a
script that completes them. Those at the end come from packages that are installed beside the server.

"""


def settings_page() -> str:
    """docs/settings.md."""
    sections = server_sections()
    fields = config_fields(sections)
    lines = []
    for word, group in GROUPS.items():
        members = [spec for spec in fields.values() if group_of(spec) == word]
        lines += [f"## {group.title}", "", f"`quire serve --help={word}`", ""]
        for spec in members:
            lines += setting_entry(spec, sections)
    lines += ["## Variables that are no settings", "", "| variable | what reads it |", "|---|---|"]
    lines += [f"| `{name}` | {_cell(text)} |" for name, text in OTHER_VARIABLES.items()]
    return SETTINGS_HEAD + "\n".join(lines) + "\n"


def setting_entry(spec: ConfigField, sections: Sections) -> list[str]:
    """All that there is to say of a setting, in Markdown."""
    variable = f"`{spec.env}`"
    if spec.name in VLLM_VARIABLES:
        variable += f" (where it is not set, `{VLLM_VARIABLES[spec.name]}`)"
    default = default_text(spec)
    rows = [
        ("flag", f"`{usage_text(spec)}`"),
        ("value", _values(spec) + (", never shown" if spec.secret else "")),
        ("must", _rule(spec, sections)),
        ("default", f"`{default}`" if default is not None else "none"),
        ("environment", variable),
        ("in a file", f"`{spec.name}:`"),
        ("read by", ", ".join(f"`{section}.{field}`" for section, field in spec.owners)),
    ]
    table = [f"| {title} | {_cell(text)} |" for title, text in rows if text]
    return [f"### {spec.name}", "", _prose(spec.help), "", "| | |", "|---|---|", *table, ""]


def _values(spec: ConfigField) -> str:
    """What kinds of values a setting takes, in words, with their unit."""
    kinds = [kind for kind in _alternatives(spec.type) if kind is not type(None)]
    words = " or ".join(_kind(kind) for kind in kinds)
    return f"{words}, {spec.unit}" if spec.unit else words


def _kind(kind: Any) -> str:
    origin = typing.get_origin(kind) or kind
    if origin is tuple:
        return f"list of {_kind(typing.get_args(kind)[0])}".replace("number", "numbers")
    return _KINDS[dict if issubclass(origin, Mapping) else origin]


def _alternatives(kind: Any) -> tuple[Any, ...]:
    is_union = typing.get_origin(kind) in (typing.Union, types.UnionType)
    return typing.get_args(kind) if is_union else (kind,)


def _rule(spec: ConfigField, sections: Sections) -> str:
    """What values must be: what the setting's check says of one that cannot be right; empty where it has none."""
    section, field = spec.owners[0]
    check = sections[section].__dataclass_fields__[field].metadata.get("check")
    kinds = _alternatives(spec.type)
    if check is None or spec.secret or bool in kinds:
        return ""
    lists = [typing.get_args(kind)[0] for kind in kinds if typing.get_origin(kind) is tuple]
    wrong: Any = ("",) if lists == [str] else (object(),) if lists else object()
    return str(check(wrong) or "")


def commands_page() -> str:
    """docs/commands.md."""
    names = ["serve", *(name for name in COMMANDS if name != "serve")]
    lines = [line for name in names for line in _command(name, COMMANDS[name])]
    for package, parsers in plugin_parsers().items():
        for parser in parsers:
            lines += _plugin_command(package, parser, "##")
    return COMMANDS_HEAD + "\n".join(lines).rstrip("\n") + "\n"


def _command(name: str, command: Command) -> list[str]:
    lines = [f"## quire {name}", "", f"{_sentence(command.text)}", "", "```", f"quire {name} {command.usage}".rstrip()]
    lines += ["```", ""]
    lines += _arguments(command.parser(name))
    if command.sections is not None:
        of_all = command.sections is server_sections
        lines += [
            f"It takes {'all' if of_all else 'those'} [settings](settings.md){'' if of_all else ' of the engine'}, and "
            "`--config FILE`.",
            "",
        ]
    return lines


def plugin_parsers() -> dict[str, list[argparse.ArgumentParser]]:
    """Package of this workspace -> the parsers of the commands that it adds to `quire`."""
    members = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["uv"]["workspace"]["members"]
    parsers: dict[str, list[argparse.ArgumentParser]] = {}
    for member in members:
        project = tomllib.loads((ROOT / member / "pyproject.toml").read_text())["project"]
        for name, place in project.get("entry-points", {}).get("quire.commands", {}).items():
            module, _, function = place.partition(":")
            commands = argparse.ArgumentParser("quire").add_subparsers()
            getattr(importlib.import_module(module), function)(commands)
            parser = commands.choices[name]
            parser.description = _sentence(_texts(commands)[name])
            parsers.setdefault(project["name"], []).append(parser)
    return parsers


def _plugin_command(package: str, parser: argparse.ArgumentParser, mark: str) -> Iterator[str]:
    text = f"From the package `{package}`." if mark == "##" else ""
    yield from [f"{mark} {parser.prog}", ""]
    if parser.description or text:
        yield from [" ".join(filter(None, [parser.description, text])), ""]
    yield from _arguments(parser)
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            seen: set[int] = set()
            for name, below in action.choices.items():
                if id(below) in seen:  # another name of the same
                    continue
                seen.add(id(below))
                below.description = below.description or _sentence(_texts(action)[name])
                yield from _plugin_command(package, below, mark + "#")


def _texts(commands: argparse._SubParsersAction[Any]) -> dict[str, str]:
    """Name of a command -> what it does."""
    return {each.dest: each.help or "" for each in commands._choices_actions}


def _arguments(parser: argparse.ArgumentParser) -> list[str]:
    rows = []
    for action in parser._actions:
        if isinstance(action, (argparse._HelpAction, argparse._SubParsersAction)) or action.help == argparse.SUPPRESS:
            continue
        text = (action.help or "") % {**vars(action), "prog": parser.prog}
        is_needed = action.required and bool(action.option_strings)
        rows.append(f"| `{_cell(_usage(action))}` | {_cell(text)}{' (required)' if is_needed else ''} |")
    return ["| | |", "|---|---|", *rows, ""] if rows else []


def _usage(action: argparse.Action) -> str:
    """An argument as it is typed, e.g. "--seed SEED"."""
    names = ", ".join(action.option_strings)
    if action.nargs == 0:
        return names
    value: Any = action.metavar
    if value is None and action.choices is not None:
        value = "{" + ",".join(map(str, action.choices)) + "}"
    if value is None:
        value = action.dest.upper() if action.option_strings else action.dest
    value = " ".join(value) if isinstance(value, tuple) else value
    value += " ..." if action.nargs in ("+", "*", argparse.REMAINDER) else ""
    return f"{names} {value}".strip()


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}.".replace("..", ".") if text else ""


def _prose(text: str) -> str:
    """Text of a help line that Markdown shows as it is: what stands in code stays, the rest is escaped."""
    pieces = re.split(r"(`[^`]*`)", text)
    return "".join(piece if piece.startswith("`") else re.sub(r"([<>*\[\]_])", r"\\\1", piece) for piece in pieces)


def _cell(text: str) -> str:
    """The same in a table, where a bar would end the cell."""
    return re.sub(r"(?<!\\)\|", r"\\|", " ".join(text.split()))


def vllm_page() -> str:
    """docs/coming-from-vllm.md with vLLM's flags as they are answered now."""
    page = (ROOT / "docs" / "coming-from-vllm.md").read_text()
    before, _, rest = page.partition(VLLM_BEGIN)
    return f"{before}{VLLM_BEGIN}{vllm_flags()}{VLLM_END}{rest.partition(VLLM_END)[2]}"


def vllm_flags() -> str:
    """vLLM's spellings of our flags, and its flags that are none here with the answer to each, in Markdown."""
    lines = ["| vLLM | Quire |", "|---|---|"]
    lines += [f"| `{theirs}` | `{ours}` |" for theirs, ours in sorted(OTHER_SPELLINGS.items())]
    lines += ["", "In brackets: the values that are accepted, where not all are.", "", "| vLLM | here |", "|---|---|"]
    for words, members in _vllm_answers().items():
        lines.append(f"| {', '.join(members)} | {_cell(_prose(words))} |")
    return "\n" + "\n".join(lines) + "\n\n"


def _vllm_answers() -> dict[str, list[str]]:
    """Answer -> vLLM's flags that get it, each with the values that it may have."""
    own = config_fields(server_sections())
    answers: dict[str, list[str]] = {}
    for name, setting in VLLM_SETTINGS.items():
        if name not in own:
            answers.setdefault(setting.words, []).append(f"`--{name.replace('_', '-')}`{_accepted(setting)}")
    return answers


def _accepted(setting: VLLMSetting) -> str:
    """Values that a flag of vLLM's may have, in brackets; empty where it may have any without a word."""
    if setting.values is None:
        return " (with a warning)" if setting.is_noted else ""
    words = ", ".join(setting.values) or "none"
    return f" ({words}, with a warning)" if setting.is_noted else f" ({words})"


PAGES = {"settings.md": settings_page, "commands.md": commands_page, "coming-from-vllm.md": vllm_page}


if __name__ == "__main__":
    for name, page in PAGES.items():
        (ROOT / "docs" / name).write_text(page())

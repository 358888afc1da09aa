"""How a command line becomes settings: flags of all fields, vLLM's spellings of them, the other sources beside it.

Only argparse is imported until a command line is read. Which commands there are, `quire_server.cli` says.
"""

from __future__ import annotations

import argparse
import json
import re
import typing
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from quire_interfaces import ConfigError

if TYPE_CHECKING:
    from quire.setting_fields import ConfigField, Origin, Sections

__all__ = ["Parser", "add_setting_flags", "settings_from"]

_LEVEL = re.compile(r"-O=?\d*")
_NUMBER = re.compile(r"-\.?\d")
_SWITCH_VALUES = {
    **dict.fromkeys(("true", "on", "1", "yes"), True),
    **dict.fromkeys(("false", "off", "0", "no"), False),
}


class Parser(argparse.ArgumentParser):
    """Says what is wrong without the list of all flags before it. Help is `quire_server.help_text`'s."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, allow_abbrev=False, add_help=False)

    def error(self, message: str) -> typing.NoReturn:
        self.exit(2, f"{self.prog}: {message}; `{self.prog} --help` lists the flags\n")


def settings_from(
    parser: Parser, arguments: list[str], sections: Sections
) -> tuple[dict[str, Any], dict[str, Origin], argparse.Namespace]:
    """Settings from a --config file, the environment and the command line; the later win. A positional MODEL counts as
    the setting `model`.

    Args:
        parser: Has the command's own arguments; gets the settings' flags.
        arguments: The command line, without the command's name.
        sections: What the command has settings of; empty where it has none.

    Returns:
        Section -> configuration, name -> where its value came from, and everything that was parsed.

    Raises:
        ConfigError: unknown names (with the nearest known ones) and bad values.
    """
    from quire.config import ENVIRONMENT, build_sections, speculative_settings
    from quire.environment import environment_values, warn_unknown_variables
    from quire.setting_fields import config_fields
    from quire.vllm_settings import VLLM_SETTINGS

    fields = config_fields(sections)
    if fields:
        warn_unknown_variables(fields)
        add_setting_flags(parser, fields)
    respelled = _respelled(arguments, parser, fields)
    _refuse_loose_secret(respelled, fields)
    args, unexpected = parser.parse_known_args(respelled)
    if unexpected:
        parser.error(f"unexpected argument {unexpected[0]!r}")
    if not fields:
        return {}, {}, args
    names = fields.keys() | VLLM_SETTINGS.keys()
    given = {
        name: _flat(value, is_secret=name in fields and fields[name].secret)
        for name, value in vars(args).items()
        if name in names and value is not None
    }
    if args.speculative_config is not None:
        given |= speculative_settings(args.speculative_config)
    if args.optimization_level is not None:
        given |= _compilation(args.optimization_level, given)
    if getattr(args, "MODEL", None) is not None:
        if not args.MODEL.strip():
            raise ConfigError("MODEL is empty; name a model, or leave it out for the demo model", field="model")
        if given.get("model", args.MODEL) != args.MODEL:
            raise ConfigError(
                f"MODEL is {args.MODEL!r} and --model is {given['model']!r}; give one of them", field="model"
            )
        given["model"] = args.MODEL
    environment = environment_values(fields)
    sources: list[tuple[str, Mapping[str, Any]]] = [(ENVIRONMENT, environment), ("command line", given)]
    if args.config is not None:
        values = {name: _of_field(fields.get(name), value) for name, value in _read_yaml(args.config).items()}
        sources.insert(0, (args.config, values))
    built, origins = build_sections(sections, sources)
    if "model" in origins and origins["model"].value is None:
        _refuse_swallowed_model(args, fields)
    return built, origins, args


def add_setting_flags(parser: argparse.ArgumentParser, fields: Mapping[str, ConfigField]) -> None:
    """Flags of all settings, and vLLM's that stand for none of them."""
    from quire.vllm_settings import VLLM_SETTINGS

    parser.add_argument("--config", metavar="FILE", help="YAML file with settings by name")
    parser.add_argument("--speculative-config", metavar="JSON", help="speculation as one JSON object, as in vLLM")
    levels = "0 compiles nothing, 1 to 3 are --compilation-config '{\"mode\": 1}'"
    parser.add_argument("-O", dest="optimization_level", type=int, choices=range(4), metavar="LEVEL", help=levels)
    for spec in fields.values():
        own = VLLM_SETTINGS.get(spec.name)
        flags = [spec.flag, *([own.short] if own is not None and own.short else [])]
        if spec.type is bool or bool in typing.get_args(spec.type):
            parser.add_argument(*flags, dest=spec.name, action=argparse.BooleanOptionalAction, default=None)
        elif _is_list(spec):
            count = 1 if spec.secret else "+"  # a secret must not swallow MODEL
            parser.add_argument(*flags, dest=spec.name, nargs=count, action="append", metavar="VALUE")
        else:
            parser.add_argument(*flags, dest=spec.name, metavar="VALUE")
    _add_vllm_flags(parser, fields)


def _is_list(spec: ConfigField) -> bool:
    return any((typing.get_origin(kind) or kind) is tuple for kind in (spec.type, *typing.get_args(spec.type)))


def _add_vllm_flags(parser: argparse.ArgumentParser, fields: Mapping[str, ConfigField]) -> None:
    from quire.vllm_settings import VLLM_SETTINGS

    for name, setting in VLLM_SETTINGS.items():
        if name in fields:
            continue
        flags = [f"--{name.replace('_', '-')}", *([setting.short] if setting.short else [])]
        if setting.is_switch:
            parser.add_argument(*flags, dest=name, action=argparse.BooleanOptionalAction, default=None)
        elif setting.takes_several:
            parser.add_argument(*flags, dest=name, nargs="+", action="append")
        else:
            parser.add_argument(*flags, dest=name)


def _respelled(arguments: Sequence[str], parser: Parser, fields: Mapping[str, ConfigField]) -> list[str]:
    """A command line as argparse reads it. vLLM also takes underscores, `--config.key value` for members of a JSON
    value, and other names for some flags. Whatever starts with dashes must be a flag: argparse takes an unknown one
    that holds a space, or one behind a flag with several values, for a value.

    Raises:
        ConfigError: an unknown flag, a value that a switch does not take, members of a value that is no object or is
            given whole, too.
    """
    from quire.vllm_settings import OTHER_SPELLINGS

    actions = {flag: action for action in parser._actions for flag in action.option_strings}
    result: list[str] = []
    members: dict[str, dict[str, Any]] = {}
    rest = iter(arguments)
    for argument in rest:
        if argument == "--":
            result += ["--", *rest]
            break
        if not argument.startswith("-") or argument == "-" or _NUMBER.match(argument):
            _refuse_value_of_switch(argument, result, actions)
            result.append(argument)
            continue
        flag, equals, value = argument.partition("=")
        flag, dot, member = flag.partition(".")
        if flag.startswith("--"):
            flag = flag.replace("_", "-")
        if fields:
            flag = OTHER_SPELLINGS.get(flag, flag)
        if flag not in actions and not (fields and _LEVEL.fullmatch(argument)):
            raise _unknown_flag(argument.partition("=")[0].partition(" ")[0], fields, actions)
        if dot:
            _require_object(flag, fields)
            _set_member(members.setdefault(flag, {}), member, value if equals else _value_after(argument, rest))
        elif equals and isinstance(actions.get(flag), argparse.BooleanOptionalAction):
            result.append(_switch(flag, value))
        else:
            result.append(flag + equals + value)
    end = result.index("--") if "--" in result else len(result)
    return [*result[:end], *_members_as_json(members, result[:end]), *result[end:]]


def _unknown_flag(flag: str, fields: Mapping[str, ConfigField], actions: Mapping[str, argparse.Action]) -> ConfigError:
    from quire.config import unknown_name_error

    if fields and flag.startswith("--"):
        return unknown_name_error(flag, fields, "command line")
    import difflib

    nearest = difflib.get_close_matches(flag, actions, n=1, cutoff=0.5)
    hint = f"; did you mean {nearest[0]}?" if nearest else ""
    return ConfigError(f"there is no flag {flag}{hint}", field=flag)


def _switch(flag: str, value: str) -> str:
    """`--flag=false` as `--no-flag`."""
    if value.lower() not in _SWITCH_VALUES or flag.startswith("--no-"):
        raise ConfigError(f"{flag} is a switch; write it alone, not with {value!r}", field=flag)
    return flag if _SWITCH_VALUES[value.lower()] else flag.replace("--", "--no-", 1)


def _refuse_value_of_switch(argument: str, before: list[str], actions: Mapping[str, argparse.Action]) -> None:
    """`--flag false` would start a model called false."""
    flag = before[-1] if before else ""
    if argument.lower() in ("true", "false") and isinstance(actions.get(flag), argparse.BooleanOptionalAction):
        off = flag if flag.startswith("--no-") else flag.replace("--", "--no-", 1)
        raise ConfigError(
            f"{flag} is a switch and takes no value; write {flag} alone, or {off} to turn it off", field=flag
        )


def _require_object(flag: str, fields: Mapping[str, ConfigField]) -> None:
    from quire.vllm_settings import VLLM_SETTINGS

    name = flag.removeprefix("--").replace("-", "_")
    is_table = name in fields and "dict" in str(fields[name].type)
    is_vllms = name in VLLM_SETTINGS and not VLLM_SETTINGS[name].is_switch
    if not (is_table or is_vllms or name == "speculative_config"):
        raise ConfigError(f"{flag} takes no object, so that it has no members to set", field=name)


def _value_after(argument: str, rest: Iterator[str]) -> str:
    value = next(rest, None)
    if value is None or value.startswith("--"):
        raise ConfigError(f"{argument} expects a value after it", field=argument)
    return value


def _set_member(whole: dict[str, Any], path: str, text: str) -> None:
    *parents, last = path.split(".")
    for parent in parents:
        inner = whole.setdefault(parent, {})
        if not isinstance(inner, dict):
            raise ConfigError(f"{parent} is given as {inner!r} and by its members; give one of them", field=path)
        whole = inner
    try:
        whole[last] = json.loads(text)
    except ValueError:  # text needs no quotes
        whole[last] = text


def _members_as_json(members: dict[str, dict[str, Any]], others: list[str]) -> list[str]:
    flags = {argument.partition("=")[0] for argument in others}
    for flag in members:
        if flag in flags:
            raise ConfigError(f"{flag} is given whole and by its members; give one of them", field=flag)
    return [f"{flag}={json.dumps(value)}" for flag, value in members.items()]


def _refuse_swallowed_model(args: argparse.Namespace, fields: Mapping[str, ConfigField]) -> None:
    """No model is named, and a flag with several values has one that looks like it.

    Raises:
        ConfigError: the two readings, and how to say which is meant.
    """
    import os

    for name, parts in vars(args).items():
        if name not in fields or not isinstance(parts, list):
            continue
        for values in parts:
            last = values[-1]
            if len(values) > 1 and (os.path.isdir(last) or re.fullmatch(r"[\w.-]+/[\w.-]+", last)):
                raise ConfigError(
                    f"{last!r} was read as one more value of {fields[name].flag}, and no model is named; write MODEL "
                    f"first (quire serve {last} {fields[name].flag} ...), or -- before it",
                    field=name,
                )


def _refuse_loose_secret(arguments: Sequence[str], fields: Mapping[str, ConfigField]) -> None:
    """`--api-key KEY KEY` would take the second key for MODEL, ask a hub for it, and print it.

    Raises:
        ConfigError: what stands behind a secret is not certainly a model; it is not shown.
    """
    import os

    secrets = {spec.flag: spec for spec in fields.values() if spec.secret}
    end = arguments.index("--") if "--" in arguments else len(arguments)
    for flag, _, behind in zip(arguments[:end], arguments[1:end], arguments[2:end], strict=False):
        if flag not in secrets or behind.startswith("-"):
            continue
        has_model = not arguments[0].startswith("-")
        if has_model or not (os.path.exists(behind) or re.fullmatch(r"[\w.-]+/[\w.-]+", behind)):
            raise ConfigError(
                f"what stands behind {flag} and its value is neither a flag nor a model's folder or hub name; several "
                f"values have commas between them ({flag} A,B), and MODEL stands best before all flags",
                field=secrets[flag].name,
            )


def _flat(value: Any, *, is_secret: bool) -> Any:
    """The items of a flag that takes several; vLLM also takes some of these as a JSON list. Those of a secret are read
    as in an environment variable, with commas between them."""
    if not isinstance(value, list):
        return value
    from quire.setting_text import json_list

    items: list[Any] = []
    for text in (text for part in value for text in part):
        listed = json_list(text)
        if listed is None:
            listed = [part.strip() for part in text.split(",")] if is_secret else [text]
        items += listed
    return tuple(items)


def _compilation(level: int, values: Mapping[str, Any]) -> dict[str, Any]:
    """vLLM's short flag. Its levels differ in passes of its own: here each above 0 is torch.compile."""
    if "compilation_config" in values:
        raise ConfigError(
            f"-O{level} and --compilation-config say the same thing; give one of them", field="compilation_config"
        )
    return {"compilation_config": {"mode": min(level, 1)}}


def _read_yaml(path: str) -> dict[str, Any]:
    import yaml

    try:
        with open(path, encoding="utf-8") as file:
            values = yaml.safe_load(file)
    except (OSError, yaml.YAMLError) as error:
        raise ConfigError(f"cannot read the settings file {path}: {error}", field="config") from None
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise ConfigError(f"{path} must hold settings as 'name: value', got a {type(values).__name__}", field="config")
    return {str(name).replace("-", "_"): value for name, value in values.items()}


def _of_field(spec: ConfigField | None, value: Any) -> Any:
    """A value of a YAML file as its field takes it: YAML reads `host: 5` as a number and `port: [1]` as a list.

    Raises:
        ConfigError: a list, a mapping or a truth value where none belongs.
    """
    if spec is None or value is None:
        return value
    kinds = {typing.get_origin(kind) or kind for kind in (spec.type, *typing.get_args(spec.type))}
    value_text = "a value of the kind" if spec.secret else repr(value)
    wrong = ConfigError(f"{spec.name} does not take {value_text} ({type(value).__name__})", field=spec.name)
    if isinstance(value, list):
        if tuple not in kinds:
            raise wrong
        texts = ["" if item is None else str(item) for item in value]
        return tuple(texts if str in _items(spec.type) else value)
    if (isinstance(value, dict) and dict not in kinds) or (isinstance(value, bool) and bool not in kinds):
        raise wrong
    # Text is converted to the field's type later, with an error that names the flag.
    return value if isinstance(value, (dict, bool)) else str(value)


def _items(hint: Any) -> tuple[Any, ...]:
    """Types of the elements of tuples inside of `hint`."""
    parts = (hint, *typing.get_args(hint))
    return tuple(item for part in parts if typing.get_origin(part) is tuple for item in typing.get_args(part))

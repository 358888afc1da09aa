"""The `quire` command. Only argparse is imported until a subcommand runs, so that each starts quickly."""

from __future__ import annotations

import argparse
import os
import sys
import typing
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from quire.config import ConfigField, Origin, Sections

__all__ = ["main"]

COMMANDS: dict[str, tuple[str, Callable[[list[str]], int]]] = {}
"""Name -> what it does in a few words, and the function that runs it with the arguments after the name."""

SECRETS = frozenset({"api_key"})
"""Settings whose values are never printed, and whose flag takes one value each: a secret must not swallow MODEL."""


def main(argv: list[str] | None = None) -> int:
    """Run a command line; the exit status."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    from quire_interfaces import QuireError

    try:
        if not arguments or arguments[0] in ("-h", "--help", "help"):
            print(usage())
            return 0
        name, *rest = arguments
        if name in ("--version", "-V"):
            name = "version"
        if name in COMMANDS:
            return COMMANDS[name][1](rest)
        return _run_plugin(name, rest)
    except QuireError as error:
        print(f"quire: {error}", file=sys.stderr)
        return 1
    except BrokenPipeError:
        return 0
    except KeyboardInterrupt:
        return 130


def usage() -> str:
    """The list of commands."""
    lines = [f"  {name:<12}{text}" for name, (text, _) in COMMANDS.items()]
    lines += [f"  {name:<12}(from an installed package; quire {name} --help)" for name in sorted(_plugins())]
    return "usage: quire COMMAND ...\n\n" + "\n".join(lines) + "\n\n`quire COMMAND --help` says more."


class _Parser(argparse.ArgumentParser):
    """Says what is wrong without the list of all flags before it."""

    def error(self, message: str) -> typing.NoReturn:
        self.exit(2, f"{self.prog}: {message}; `{self.prog} --help` lists the flags\n")


def command(name: str, text: str) -> Callable[[Callable[[list[str]], int]], Callable[[list[str]], int]]:
    def register(function: Callable[[list[str]], int]) -> Callable[[list[str]], int]:
        COMMANDS[name] = (text, function)
        return function

    return register


@command("serve", "serve a model over the OpenAI API, with a chat page")
def run_serve(arguments: list[str]) -> int:
    sections = server_sections()
    parser = _Parser(
        "quire serve",
        usage="quire serve [MODEL] [--flag value ...]",
        description="Serve a model; without MODEL, the embedded demo model.",
        allow_abbrev=False,
    )
    parser.add_argument("MODEL", nargs="?", help="checkpoint folder or hub name")
    built, _, _ = settings_from(parser, arguments, sections)
    from quire.config import QuireConfig
    from quire_server.config import ServerConfig
    from quire_server.serve import serve

    server = built.pop("server")
    assert isinstance(server, ServerConfig)
    return serve(QuireConfig(**built), server)


@command("plan", "print the memory ledger of a model, from config.json alone")
def run_plan(arguments: list[str]) -> int:
    from quire.config import QuireConfig

    parser = _Parser("quire plan", usage="quire plan [MODEL] [--flag value ...]", allow_abbrev=False)
    parser.add_argument("MODEL", nargs="?", help="checkpoint folder or hub name (default: the demo model)")
    parser.add_argument("--json", action="store_true", dest="as_json", help="machine-readable")
    built, _, args = settings_from(parser, arguments, QuireConfig.sections())
    from quire_server.plan_report import print_plan

    return print_plan(QuireConfig(**built), as_json=args.as_json)


@command("compile-kernels", "compile a model's kernels for a kind of GPU, which need not be here")
def run_compile_kernels(arguments: list[str]) -> int:
    from pathlib import Path

    from quire.config import QuireConfig

    parser = _Parser(
        "quire compile-kernels",
        usage="quire compile-kernels [MODEL] --target TARGET [--gpu NAME] --out FOLDER [--flag value ...]",
        allow_abbrev=False,
    )
    parser.add_argument("MODEL", nargs="?", help="checkpoint folder or hub name (default: the demo model)")
    parser.add_argument("--target", required=True, help="kind of GPU, e.g. sm_90 or gfx942")
    parser.add_argument(
        "--gpu",
        metavar="NAME",
        help="its name, e.g. h200 or instinct-mi300x, where there is a table (quire tune) for it",
    )
    parser.add_argument("--out", required=True, metavar="FOLDER", help="for --kernel-cache; may hold some already")
    parser.add_argument("--jobs", type=int, metavar="N", help="processes (default: one for each core)")
    built, _, args = settings_from(parser, arguments, QuireConfig.sections())
    from quire.kernel_list import compile_kernels

    found = compile_kernels(
        QuireConfig(**built), args.target, Path(args.out), gpu=args.gpu, num_processes=args.jobs
    )  # fmt: skip
    print(f"{found['kernels']} kernels for {args.target} in {args.out}, {found['compiled']} of them compiled now")
    return 0


@command("tune", "find the fastest configurations of a model's GPU kernels, on the GPU of this machine")
def run_tune(arguments: list[str]) -> int:
    from quire.config import QuireConfig

    parser = _Parser("quire tune", usage="quire tune [MODEL] --out FOLDER [--flag value ...]", allow_abbrev=False)
    parser.add_argument("MODEL", nargs="?", help="checkpoint folder or hub name (default: the demo model)")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--out", metavar="FOLDER", help="for --kernel-tables; may hold some already")
    what.add_argument("--list", metavar="TARGET", help="say what would be tried on this kind of GPU, e.g. gfx942")
    parser.add_argument(
        "--context", type=int, default=4096, metavar="TOKENS", help="of sequences that are decoded (default: 4096)"
    )
    parser.add_argument("--jobs", type=int, metavar="N", help="processes that compile (default: one for each core)")
    built, _, args = settings_from(parser, arguments, QuireConfig.sections())
    from quire_server.tune_report import print_problems, print_tuning

    if args.list is not None:
        return print_problems(QuireConfig(**built), args.list)
    return print_tuning(QuireConfig(**built), args.out, context=args.context, num_processes=args.jobs)


@command("eval", "measure a model's perplexity on a text, and its answers, before and after quantization")
def run_eval(arguments: list[str]) -> int:
    from quire.config import QuireConfig

    parser = _Parser("quire eval", usage="quire eval [MODEL] --text FILE [--flag value ...]", allow_abbrev=False)
    parser.add_argument("MODEL", nargs="?", help="checkpoint folder or hub name (default: the demo model)")
    parser.add_argument("--text", required=True, metavar="FILE", help="UTF-8 text to predict")
    parser.add_argument("--tasks", metavar="FILE", help="JSONL of conversations that end with the right answer")
    parser.add_argument("--window", type=int, default=512, metavar="TOKENS", help="tokens at a time (default: 512)")
    parser.add_argument(
        "--against", nargs="+", default=[], metavar="FORM", help="values of --quantization to compare with, or none"
    )
    parser.add_argument("--json", action="store_true", dest="as_json", help="machine-readable")
    built, _, args = settings_from(parser, arguments, QuireConfig.sections())
    from quire_server.eval_report import print_eval

    return print_eval(
        QuireConfig(**built),
        args.text,
        window=args.window,
        against=args.against,
        as_json=args.as_json,
        tasks_file=args.tasks,
    )


@command("quantize", "write a checkpoint with quantized weights")
def run_quantize(arguments: list[str]) -> int:
    parser = _Parser("quire quantize", usage="quire quantize MODEL OUT --scheme NAME", allow_abbrev=False)
    parser.add_argument("MODEL", help="folder or hub name of an unquantized checkpoint")
    parser.add_argument("OUT", help="folder to write, new or empty")
    parser.add_argument(
        "--scheme", required=True, metavar="NAME", help="int8, fp8, fp8-static, int4-g128, int4-g64 or int4-g32"
    )
    parser.add_argument(
        "--algorithm", metavar="NAME", help="rtn (to nearest), gptq or awq (default: gptq with --calibration, else rtn)"
    )
    parser.add_argument(
        "--calibration",
        metavar="FILE",
        help="text of the kind that the model is for; .jsonl: a text or messages a line",
    )
    parser.add_argument(
        "--calibration-tokens", type=int, default=32768, metavar="N", help="read so many tokens of it (default: 32768)"
    )
    parser.add_argument("--revision", help="branch, tag or commit of a hub model")
    parser.add_argument("--use-modelscope", action="store_true", help="the hub is ModelScope")
    args = parser.parse_args(arguments)
    from quire_server.quantize_report import print_quantize

    return print_quantize(
        args.MODEL, args.OUT, args.scheme, algorithm=args.algorithm, calibration=args.calibration,
        calibration_tokens=args.calibration_tokens, revision=args.revision, use_modelscope=args.use_modelscope,
    )  # fmt: skip


@command("explain", "say value, source and effect of a setting; without a name, list all")
def run_explain(arguments: list[str]) -> int:
    parser = _Parser("quire explain", usage="quire explain [FIELD] [--flag value ...]", allow_abbrev=False)
    parser.add_argument("FIELD", nargs="?", help="name of a setting, e.g. max_num_seqs")
    sections = server_sections()
    _, origins, args = settings_from(parser, arguments, sections)
    from quire.config import config_fields, unknown_name_error
    from quire.environment import OTHER_VARIABLES

    fields = config_fields(sections)
    wanted = args.FIELD
    if wanted is None:
        for name, spec in fields.items():
            print(f"{name:<34}{_shown(name, origins[name].value):<20} {spec.help}")
        print("\nenvironment variables that are no settings:")
        for name, text in OTHER_VARIABLES.items():
            print(f"{name:<34}{os.environ.get(name, 'not set'):<20} {text}")
        return 0
    name = wanted.removeprefix("--").replace("-", "_")
    if name not in fields:
        raise unknown_name_error(wanted, fields, "quire explain")
    _print_field(fields[name], origins[name])
    return 0


def _print_field(spec: ConfigField, origin: Origin) -> None:
    unit = f" {spec.unit}" if spec.unit and origin.value is not None else ""
    print(f"{spec.name}: {spec.help}")
    print(f"  value    {_shown(spec.name, origin.value)}{unit} (from {origin.source})")
    print(f"  default  {spec.default!r}")
    print(f"  set by   {spec.flag}, {spec.env}, or {spec.name}: in a --config file")
    print(f"  read by  {', '.join(f'{section}.{field}' for section, field in spec.owners)}")


def _shown(name: str, value: Any) -> str:
    """The value, unless it is a secret."""
    if name in SECRETS and value:
        return f"({len(value)} hidden)"
    return repr(value)


@command("ops", "say which backend each tensor op got on this machine, and why")
def run_ops(arguments: list[str]) -> int:
    parser = _Parser("quire ops")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--device", default="cpu")
    args = parser.parse_args(arguments)
    from quire_server.ops_report import print_ops

    return print_ops(device=args.device, dtype=args.dtype)


@command("version", "print the version")
def run_version(arguments: list[str]) -> int:
    from quire import __version__

    print(f"quire {__version__}")
    return 0


def _plugins() -> dict[str, Any]:
    from importlib.metadata import entry_points

    return {point.name: point for point in entry_points(group="quire.commands")}


def _run_plugin(name: str, arguments: list[str]) -> int:
    plugins = _plugins()
    if name not in plugins:
        import difflib

        nearest = difflib.get_close_matches(name, [*COMMANDS, *plugins], n=1)
        hint = f"; did you mean {nearest[0]!r}?" if nearest else ""
        print(f"quire: there is no command {name!r}{hint}\n\n{usage()}", file=sys.stderr)
        return 2
    parser = argparse.ArgumentParser("quire")
    plugins[name].load()(parser.add_subparsers(dest="command", required=True))
    args = parser.parse_args([name, *arguments])
    return int(args.run(args))


def server_sections() -> Sections:
    """The engine's settings and the server's."""
    from quire.config import QuireConfig
    from quire_server.config import ServerConfig

    return {**QuireConfig.sections(), "server": ServerConfig}


def settings_from(
    parser: argparse.ArgumentParser,
    arguments: list[str],
    sections: Sections,
) -> tuple[dict[str, Any], dict[str, Origin], argparse.Namespace]:
    """Settings from a --config file, the environment and the command line; the later win. A positional MODEL counts as
    the setting `model`.

    Returns:
        Section -> configuration, name -> where its value came from, and everything that was parsed.

    Raises:
        ConfigError: unknown names (with the nearest known one) and bad values.
    """
    from quire.config import ENVIRONMENT, build_sections, config_fields, speculative_settings, unknown_name_error
    from quire.environment import environment_values, warn_unknown_variables
    from quire.vllm_settings import VLLM_SETTINGS

    fields = config_fields(sections)
    warn_unknown_variables(fields)
    parser.add_argument("--config", metavar="FILE", help="YAML file with settings by name")
    parser.add_argument("--speculative-config", metavar="JSON", help="speculation as one JSON object, as in vLLM")
    levels = "0 compiles nothing, 1 to 3 are --compilation-config '{\"mode\": 1}'"
    parser.add_argument("-O", dest="optimization_level", type=int, choices=range(4), metavar="LEVEL", help=levels)
    for spec in fields.values():
        _add_flag(parser, spec)
    _add_vllm_flags(parser, fields)
    args, unknown = parser.parse_known_args(_respelled(arguments))
    for argument in unknown:
        if argument.startswith("-"):
            raise unknown_name_error(argument.split("=")[0], fields, "command line")
    if unknown:
        parser.error(f"unexpected argument {unknown[0]!r}")
    names = fields.keys() | VLLM_SETTINGS.keys()
    given = {name: _flat(value) for name, value in vars(args).items() if name in names and value is not None}
    if args.speculative_config is not None:
        given |= speculative_settings(args.speculative_config)
    if args.optimization_level is not None:
        given |= _compilation(args.optimization_level, given)
    if getattr(args, "MODEL", None) is not None:
        given["model"] = args.MODEL
    environment = environment_values(fields)
    sources: list[tuple[str, Mapping[str, Any]]] = [(ENVIRONMENT, environment), ("command line", given)]
    if args.config is not None:
        values = {name: _of_field(fields.get(name), value) for name, value in _read_yaml(args.config).items()}
        sources.insert(0, (args.config, values))
    built, origins = build_sections(sections, sources)
    return built, origins, args


def _add_flag(parser: argparse.ArgumentParser, spec: ConfigField) -> None:
    kinds = [kind for kind in typing.get_args(spec.type) or (spec.type,) if kind is not type(None)]
    text = spec.help.replace("%", "%%") + f" (default: {spec.default})".replace("%", "%%")
    if kinds == [bool]:
        parser.add_argument(spec.flag, dest=spec.name, action=argparse.BooleanOptionalAction, default=None, help=text)
    elif any((typing.get_origin(kind) or kind) is tuple for kind in (*kinds, spec.type)):
        count = 1 if spec.name in SECRETS else "+"
        parser.add_argument(spec.flag, dest=spec.name, nargs=count, action="append", metavar="VALUE", help=text)
    else:
        parser.add_argument(spec.flag, dest=spec.name, metavar=(spec.unit or "value").upper().split()[0], help=text)


def _add_vllm_flags(parser: argparse.ArgumentParser, fields: Mapping[str, ConfigField]) -> None:
    """Flags of vLLM's that ask for what is so anyway; --help says nothing of them."""
    from quire.vllm_settings import VLLM_SETTINGS

    for name, setting in VLLM_SETTINGS.items():
        if name in fields:
            continue
        flags = [f"--{name.replace('_', '-')}", *([setting.short] if setting.short else [])]
        if setting.is_switch:
            action: Any = argparse.BooleanOptionalAction
            parser.add_argument(*flags, dest=name, action=action, default=None, help=argparse.SUPPRESS)
        else:
            parser.add_argument(*flags, dest=name, help=argparse.SUPPRESS)


def _respelled(arguments: list[str]) -> list[str]:
    """A command line in our spelling: vLLM also takes underscores, `--config.key value` for members of a JSON value,
    and other names for some flags.

    Raises:
        ConfigError: members of a value that is given whole, too.
    """
    from quire.vllm_settings import OTHER_SPELLINGS

    result: list[str] = []
    members: dict[str, dict[str, Any]] = {}
    rest = iter(arguments)
    for argument in rest:
        if not argument.startswith("--"):
            result.append(argument)
            continue
        flag, equals, value = argument.partition("=")
        flag, dot, member = flag.partition(".")
        flag = flag.replace("_", "-")
        if dot:
            _set_member(members.setdefault(flag, {}), member, value if equals else next(rest, ""))
        else:
            result.append(OTHER_SPELLINGS.get(flag, flag) + equals + value)
    return [*result, *_members_as_json(members, result)]


def _set_member(whole: dict[str, Any], path: str, text: str) -> None:
    import json

    *parents, last = path.split(".")
    for parent in parents:
        whole = whole.setdefault(parent, {})
    try:
        whole[last] = json.loads(text)
    except ValueError:  # text needs no quotes
        whole[last] = text


def _members_as_json(members: dict[str, dict[str, Any]], others: list[str]) -> list[str]:
    import json

    from quire_interfaces import ConfigError

    given = {argument.partition("=")[0] for argument in others}
    for flag in members:
        if flag in given:
            raise ConfigError(f"{flag} is given whole and by its members; give one of them", field=flag)
    return [f"{flag}={json.dumps(value)}" for flag, value in members.items()]


def _flat(value: Any) -> Any:
    """The items of a flag that takes several; vLLM also takes some of these as a JSON list."""
    if not isinstance(value, list):
        return value
    import json

    items: list[Any] = []
    for text in (text for part in value for text in part):
        try:
            listed = json.loads(text) if text.startswith("[") else None
        except ValueError:
            listed = None
        items += map(str, listed) if isinstance(listed, list) else [text]
    return tuple(items)


def _compilation(level: int, given: Mapping[str, Any]) -> dict[str, Any]:
    """vLLM's short flag. Its levels differ in passes of its own: here each above 0 is torch.compile."""
    from quire_interfaces import ConfigError

    if "compilation_config" in given:
        raise ConfigError(
            f"-O{level} and --compilation-config say the same thing; give one of them", field="compilation_config"
        )
    return {"compilation_config": {"mode": min(level, 1)}}


def _read_yaml(path: str) -> dict[str, Any]:
    import yaml

    from quire_interfaces import ConfigError

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
    from quire_interfaces import ConfigError

    if spec is None or value is None:
        return value
    kinds = {typing.get_origin(kind) or kind for kind in (spec.type, *typing.get_args(spec.type))}
    wrong = ConfigError(f"{spec.name} does not take {value!r} ({type(value).__name__})", field=spec.name)
    if isinstance(value, list):
        if tuple not in kinds:
            raise wrong
        return tuple(str(item) if str in _items(spec.type) else item for item in value)
    if (isinstance(value, dict) and dict not in kinds) or (isinstance(value, bool) and bool not in kinds):
        raise wrong
    # Text is converted to the field's type later, with an error that names the flag.
    return value if isinstance(value, (dict, bool)) else str(value)


def _items(hint: Any) -> tuple[Any, ...]:
    """Types of the elements of tuples inside of `hint`."""
    parts = (hint, *typing.get_args(hint))
    return tuple(item for part in parts if typing.get_origin(part) is tuple for item in typing.get_args(part))


if __name__ == "__main__":
    sys.exit(main())

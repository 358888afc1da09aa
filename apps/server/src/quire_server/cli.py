"""The `quire` command. Only argparse is imported until a subcommand runs, so that each starts quickly."""

from __future__ import annotations

import argparse
import os
import sys
from typing import TYPE_CHECKING, Any

import quire_server.terminal.commands  # noqa: F401 - they stand in the table
from quire_server.command_line import settings_from
from quire_server.commands import (
    COMMANDS,
    JSON,
    MODEL,
    Command,
    ParsedCommand,
    argument,
    command,
    engine_sections,
    server_sections,
)

if TYPE_CHECKING:
    from quire.setting_fields import ConfigField, Origin
    from quire_interfaces.plugins import Plugin
    from quire_server.completion import CompletedFlag

__all__ = ["main"]


def main(argv: list[str] | None = None) -> int:
    """Run a command line; the exit status."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments[:1] != ["serve"]:
        return _main(arguments)
    from quire_server.stopping import stopping_on_signals

    with stopping_on_signals():  # before anything else is imported
        return _main(arguments)


def _main(arguments: list[str]) -> int:
    from quire_interfaces import QuireError

    try:
        if not arguments or arguments[0] in ("-h", "--help", "help"):
            print(usage())
            return 0
        name, *rest = arguments
        if name in ("--version", "-V"):
            name = "version"
        if name in COMMANDS:
            return _run(name, COMMANDS[name], rest)
        return _run_plugin(name, rest)
    except QuireError as error:
        from quire_server.exit_status import exit_status_of

        print(f"quire: {error}", file=sys.stderr)
        return exit_status_of(error)
    except BrokenPipeError:
        return 0
    except KeyboardInterrupt:
        return 130


def usage() -> str:
    """The list of commands."""
    names = ["serve", *(name for name in COMMANDS if name != "serve")]
    lines = [f"  {name:<17}{COMMANDS[name].text}" for name in names]
    lines += [f"  {name:<17}(from an installed package; quire {name} --help)" for name in sorted(_plugins())]
    return "usage: quire COMMAND ...\n\n" + "\n".join(lines) + "\n\n`quire COMMAND --help` says more."


def _run(name: str, command: Command, arguments: list[str]) -> int:
    from quire_server.help_text import page_of, topic_of

    parser = command.parser(name)
    sections = command.sections() if command.sections is not None else {}
    topic = topic_of(arguments)
    if topic is not None:
        from quire.setting_fields import config_fields

        print(page_of(parser.prog, command.usage, command.text, parser, config_fields(sections), topic))
        return 0
    return command.run(ParsedCommand(*settings_from(parser, arguments, sections)))


@command(
    "serve",
    "serve a model over the OpenAI API, with a chat page",
    "[MODEL] [--flag value ...]",
    MODEL,
    sections=server_sections,
)
def run_serve(parsed: ParsedCommand) -> int:
    import logging

    from quire_interfaces import QuireError
    from quire_server.exit_status import exit_status_of
    from quire_server.headless import serve_headless
    from quire_server.serve import serve

    server, config = parsed.sections["server"], parsed.engine_config()
    try:
        if config.data_parallel.headless:
            return serve_headless(config, server)
        if server.models_dir is not None:
            from quire_server.model_router.serve import serve_models

            return serve_models(config, server, parsed.origins)
        return serve(config, server)
    except QuireError as error:
        if server.log_format != "json":
            raise
        logging.getLogger("quire").critical("%s", error)
        return exit_status_of(error)


@command(
    "run-batch",
    "answer a file of requests, as /v1/batches does, without a server",
    "-i FILE -o FILE [MODEL] [--flag value ...]",
    MODEL,
    argument(
        "-i",
        "--input-file",
        required=True,
        metavar="FILE",
        help="JSONL with custom_id, method, url and body on each line; an http(s) URL where media may come from it",
    ),
    argument("-o", "--output-file", required=True, metavar="FILE", help="JSONL of answers, in the order of the input"),
    sections=server_sections,
)
def run_run_batch(parsed: ParsedCommand) -> int:
    from quire_server.batches.run_batch import run_batch

    args = parsed.args
    return run_batch(parsed.engine_config(), parsed.sections["server"], args.input_file, args.output_file)


@command(
    "plan",
    "print the memory ledger of a model, from config.json alone, and whether it fits here",
    "[MODEL] [--json] [--flag value ...]",
    MODEL,
    JSON,
    sections=engine_sections,
)
def run_plan(parsed: ParsedCommand) -> int:
    from quire_server.plan_report import print_plan

    return print_plan(parsed.engine_config(), as_json=parsed.args.as_json)


@command(
    "kv-serve",
    "keep prefix blocks for a fleet of engines (--kv-tier), in memory and on disk",
    "--listen ADDRESS [--memory SIZE] [--disk-path FOLDER --disk-size SIZE] [--tenants FILE]",
    argument(
        "--listen",
        action="append",
        required=True,
        metavar="ADDRESS",
        help="unix:/path or tcp://host:port; may be repeated",
    ),
    argument("--memory", default="4GiB", metavar="SIZE", help="host memory for blocks (default: 4GiB)"),
    argument("--disk-path", metavar="FOLDER", help="keep blocks there as well, over restarts"),
    argument("--disk-size", metavar="SIZE", help="most bytes that they take there"),
    argument(
        "--tenants",
        metavar="FILE",
        help='JSON file with keys and quotas: {"NAME": {"key": "...", "memory": "4GiB", "disk": "100GiB"}}',
    ),
)
def run_kv_serve(parsed: ParsedCommand) -> int:
    from quire_server.kv_serve import kv_serve

    args = parsed.args
    return kv_serve(
        args.listen, memory=args.memory, disk_path=args.disk_path, disk_size=args.disk_size, tenants=args.tenants
    )


@command(
    "compile-kernels",
    "compile a model's kernels for a kind of GPU, which need not be here",
    "[MODEL] --target TARGET [--gpu NAME] --out FOLDER [--flag value ...]",
    MODEL,
    argument("--target", required=True, help="kind of GPU, e.g. sm_90 or gfx942"),
    argument(
        "--gpu",
        metavar="NAME",
        help="its name, e.g. h200 or instinct-mi300x, where there is a table (quire tune) for it",
    ),
    argument("--out", required=True, metavar="FOLDER", help="for --kernel-cache; may hold some already"),
    argument("--jobs", type=int, metavar="N", help="processes (default: one for each core)"),
    sections=engine_sections,
)
def run_compile_kernels(parsed: ParsedCommand) -> int:
    from pathlib import Path

    from quire.kernel_list import compile_kernels

    args = parsed.args
    results = compile_kernels(
        parsed.engine_config(), args.target, Path(args.out), gpu=args.gpu, num_processes=args.jobs
    )
    print(f"{results['kernels']} kernels for {args.target} in {args.out}, {results['compiled']} of them compiled now")
    return 0


@command(
    "tune",
    "find the fastest configurations of a model's GPU kernels, on the GPU of this machine",
    "[MODEL] (--out FOLDER | --list TARGET) [--flag value ...]",
    MODEL,
    argument("--out", is_alternative=True, metavar="FOLDER", help="for --kernel-tables; may hold some already"),
    argument(
        "--list",
        is_alternative=True,
        metavar="TARGET",
        help="say what would be tried on this kind of GPU, e.g. gfx942",
    ),
    argument(
        "--context", type=int, default=4096, metavar="TOKENS", help="of sequences that are decoded (default: 4096)"
    ),
    argument("--jobs", type=int, metavar="N", help="processes that compile (default: one for each core)"),
    sections=engine_sections,
)
def run_tune(parsed: ParsedCommand) -> int:
    from quire_server.tune_report import print_problems, print_tuning

    args, config = parsed.args, parsed.engine_config()
    if args.list is not None:
        return print_problems(config, args.list)
    return print_tuning(config, args.out, context=args.context, num_processes=args.jobs)


@command(
    "eval",
    "measure a model's perplexity on a text, and its answers, before and after quantization",
    "[MODEL] --text FILE [--flag value ...]",
    MODEL,
    argument("--text", required=True, metavar="FILE", help="UTF-8 text to predict"),
    argument("--tasks", metavar="FILE", help="JSONL of conversations that end with the right answer"),
    argument("--window", type=int, default=512, metavar="TOKENS", help="tokens at a time (default: 512)"),
    argument(
        "--against", nargs="+", default=[], metavar="FORM", help="values of --quantization to compare with, or none"
    ),
    JSON,
    sections=engine_sections,
)
def run_eval(parsed: ParsedCommand) -> int:
    from quire_server.eval_report import print_eval

    args = parsed.args
    return print_eval(
        parsed.engine_config(),
        args.text,
        window=args.window,
        against=args.against,
        as_json=args.as_json,
        tasks_file=args.tasks,
    )


@command(
    "quantize",
    "write a checkpoint with quantized weights",
    "MODEL OUT --scheme NAME",
    argument("MODEL", help="folder or hub name of an unquantized checkpoint"),
    argument("OUT", help="folder to write, new or empty"),
    argument(
        "--scheme",
        required=True,
        metavar="NAME",
        help="int8, fp8, fp8-static, int4-g128, int4-g64 or int4-g32; none leaves the weights as they are",
    ),
    argument(
        "--algorithm", metavar="NAME", help="rtn (to nearest), gptq or awq (default: gptq with --calibration, else rtn)"
    ),
    argument(
        "--kv-cache-scheme",
        metavar="NAME",
        help="scales of keys and values for an fp8 KV cache: fp8 (a layer's) or fp8-per-head; with --calibration",
    ),
    argument(
        "--calibration",
        metavar="FILE",
        help="text of the kind that the model is for; .jsonl: a text or messages a line",
    ),
    argument(
        "--calibration-tokens", type=int, default=32768, metavar="N", help="read so many tokens of it (default: 32768)"
    ),
    argument("--revision", metavar="NAME", help="branch, tag or commit of a hub model"),
    argument("--use-modelscope", action="store_true", help="the hub is ModelScope"),
)
def run_quantize(parsed: ParsedCommand) -> int:
    from quire_server.quantize_report import print_quantize

    args = parsed.args
    return print_quantize(
        args.MODEL, args.OUT, args.scheme, algorithm=args.algorithm, kv_cache_scheme=args.kv_cache_scheme,
        calibration=args.calibration,
        calibration_tokens=args.calibration_tokens, revision=args.revision, use_modelscope=args.use_modelscope,
    )  # fmt: skip


@command(
    "explain",
    "say value, source and effect of a setting; without a name, list all",
    "[FIELD] [--flag value ...]",
    argument("FIELD", nargs="?", help="name of a setting, e.g. max_num_seqs (default: all)"),
    sections=server_sections,
)
def run_explain(parsed: ParsedCommand) -> int:
    from quire.config import unknown_name_error
    from quire.environment import OTHER_VARIABLES
    from quire.setting_fields import config_fields
    from quire.vllm_settings import VLLM_SETTINGS, other_name

    fields, origins = config_fields(server_sections()), parsed.origins
    field_name = parsed.args.FIELD
    if field_name is None:
        for name, spec in fields.items():
            print(f"{name:<34}{_shown(spec, origins[name].value):<20} {spec.help}")
        print("\nenvironment variables that are no settings:")
        for name, text in OTHER_VARIABLES.items():
            print(f"{name:<34}{os.environ.get(name, 'not set'):<20} {text}")
        return 0
    name = other_name(field_name.removeprefix("--").replace("-", "_"))
    if name not in fields and name in VLLM_SETTINGS:
        print(f"{name}: a setting of vLLM's. Here: {VLLM_SETTINGS[name].words}")
        return 0
    if name not in fields:
        raise unknown_name_error(field_name, fields, "quire explain")
    _print_field(fields[name], origins[name])
    return 0


def _print_field(spec: ConfigField, origin: Origin) -> None:
    unit = f" {spec.unit}" if spec.unit and origin.value is not None else ""
    print(f"{spec.name}: {spec.help}")
    print(f"  value    {_shown(spec, origin.value)}{unit} (from {origin.source})")
    print(f"  default  {spec.default!r}")
    print(f"  set by   {spec.flag}, {spec.env}, or {spec.name}: in a --config file")
    print(f"  read by  {', '.join(f'{section}.{field}' for section, field in spec.owners)}")


def _shown(spec: ConfigField, value: Any) -> str:
    """The value, unless it is a secret."""
    if spec.secret and value:
        return f"({len(value)} hidden)"
    return repr(value)


@command(
    "ops",
    "say which backend each tensor op got on this machine, and why",
    "[--dtype NAME] [--device NAME]",
    argument("--dtype", default="bfloat16", help="type of the tensors (default: bfloat16)"),
    argument("--device", default="cpu", help="as torch names it (default: cpu)"),
)
def run_ops(parsed: ParsedCommand) -> int:
    from quire_server.ops_report import print_ops

    return print_ops(device=parsed.args.device, dtype=parsed.args.dtype)


@command(
    "completion",
    "print a script that completes command lines in bash, zsh or fish",
    "SHELL",
    argument("SHELL", help="bash, zsh or fish"),
)
def run_completion(parsed: ParsedCommand) -> int:
    from quire_server.completion import completion_script

    commands = {name: (each.text, _completed_flags(name, each)) for name, each in COMMANDS.items()}
    commands |= {name: (f"quire {name} --help says more", []) for name in sorted(_plugins())}
    print(completion_script(parsed.args.SHELL, commands), end="")
    return 0


def _completed_flags(name: str, command: Command) -> list[CompletedFlag]:
    """A command's own flags and those of its settings; vLLM's that are none of ours are left out."""
    from quire.setting_fields import config_fields
    from quire_server.command_line import add_setting_flags
    from quire_server.completion import CompletedFlag
    from quire_server.help_text import one_line

    parser = command.parser(name)
    fields = config_fields(command.sections()) if command.sections is not None else {}
    if fields:
        add_setting_flags(parser, fields)
    flags = [CompletedFlag("--help", "what it takes", takes_value=False)]
    for action in parser._actions:
        spec = fields.get(action.dest)
        if not action.option_strings or (spec is None and not action.help):
            continue
        choices = spec.choices if spec is not None else tuple(action.choices or ())
        text = one_line(spec) if spec is not None else str(action.help)
        values = tuple(map(str, choices))
        flags += [CompletedFlag(flag, text, action.nargs != 0, values) for flag in action.option_strings]
    return flags


@command("version", "print the version")
def run_version(parsed: ParsedCommand) -> int:
    from quire import __version__

    print(f"quire {__version__}")
    return 0


def _plugins() -> dict[str, Plugin]:
    from quire_interfaces.plugins import installed_plugins

    return installed_plugins("quire.commands")


def _run_plugin(name: str, arguments: list[str]) -> int:
    plugins = _plugins()
    if name not in plugins:
        import difflib

        from quire_interfaces.plugins import not_allowed_hint

        nearest = difflib.get_close_matches(name, [*COMMANDS, *plugins], n=1)
        hint = f"; did you mean {nearest[0]!r}?" if nearest else ""
        not_allowed = not_allowed_hint("quire.commands", name)
        print(f"quire: there is no command {name!r}{hint}; `quire --help` lists them{not_allowed}", file=sys.stderr)
        return 2
    parser = argparse.ArgumentParser("quire")
    plugins[name].load()(parser.add_subparsers(dest="command", required=True))
    args = parser.parse_args([name, *arguments])
    if not callable(run := getattr(args, "run", None)):
        raise plugins[name].error("must give its parser a default `run`, a function of the parsed arguments")
    return int(run(args))


if __name__ == "__main__":
    sys.exit(main())

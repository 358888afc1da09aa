"""What `quire COMMAND --help` prints: a short page, one group of flags, a search, or all.

The flags are those of the settings (`quire.config.config_fields`), described by their declarations; which group one is
in follows from the component that declares it. Nothing of what a command does is known here.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import sys
import textwrap
import typing
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from quire.setting_fields import ConfigField

__all__ = ["GROUPS", "default_text", "group_of", "one_line", "page_of", "topic_of", "usage_text"]


class Group(NamedTuple):
    """Flags that are shown together."""

    title: str
    sections: tuple[str, ...] = ()
    """Components whose settings are in it, those of other groups' `names` excepted."""
    names: tuple[str, ...] = ()
    """Further settings of it, by name."""


GROUPS: dict[str, Group] = {
    "model": Group("Model", ("model",)),
    "memory": Group(
        "Memory and KV cache",
        ("kv_cache", "kv_transfer"),
        ("gpu_memory_utilization", "kv_cache_dtype", "kv_cache_memory_bytes", "max_model_len",
         "num_gpu_blocks_override"),
    ),
    "scheduling": Group("Scheduling", ("scheduler",), ("async_scheduling", "stream_interval")),
    "device": Group("Device and kernels", ("runner",), ("attention_backend", "compilation_config",
                                                        "disabled_linear_kernels")),
    "parallel": Group("Several engines, ranks and hosts", ("data_parallel", "parallel", "hosts")),
    "speculative": Group("Speculative decoding", ("speculative",)),
    "lora": Group("LoRA", ("lora",)),
    "chat": Group(
        "Chat, tools and reasoning",
        ("renderer",),
        ("chat_template", "default_chat_template_kwargs", "enable_auto_tool_choice", "trust_request_chat_template"),
    ),
    "pooling": Group("Embeddings and scores", (), ("convert", "io_processor_plugin", "pooler_config", "pooling_model",
                                                   "runner")),
    "structured-output": Group("Structured output", ("structured_output",)),
    "server": Group("Server", ("server",)),
    "security": Group(
        "Keys, TLS and browsers",
        (),
        ("admin_api_key", "allow_credentials", "allowed_headers", "allowed_methods", "allowed_origins", "api_key",
         "api_key_file", "share_prefix_cache", "ssl_ca_certs", "ssl_cert_reqs", "ssl_certfile", "ssl_ciphers",
         "ssl_keyfile", "enable_ssl_refresh", "middleware"),
    ),
    "limits": Group(
        "Limits on requests and connections",
        (),
        ("body_timeout_s", "h11_max_header_count", "h11_max_incomplete_event_size", "header_timeout_s",
         "limit_concurrency", "max_body_bytes", "max_body_objects", "max_body_values", "max_prompts_per_request",
         "send_timeout_s", "timeout_keep_alive"),
    ),
    "responses": Group(
        "Stored responses and MCP servers",
        (),
        ("mcp_servers", "mcp_timeout_s", "response_store", "response_store_max_responses", "response_store_ttl_s"),
    ),
    "batches": Group(
        "Files and batches",
        (),
        ("batch_busy_concurrency", "batch_max_concurrency", "batch_max_requests", "files_dir", "files_max_bytes",
         "files_max_total_bytes"),
    ),
    "logging": Group(
        "Logging and metrics",
        (),
        ("access_log", "banner", "disable_access_log_for_endpoints", "disable_log_stats", "forward_output",
         "log_config_file", "log_format", "log_level",
         "log_stats_interval_s", "metrics_prefix", "uvicorn_log_level"),
    ),
    "engine": Group("Engine process", ("engine",)),
}  # fmt: skip
"""Word after --help= -> the group, in the order in which they are shown."""

MOST_USED = (
    "host", "port", "served_model_name", "api_key", "device", "dtype", "quantization", "max_model_len",
    "gpu_memory_utilization", "kv_cache_memory_bytes", "max_num_seqs", "tool_call_parser", "reasoning_parser",
    "lora_modules", "speculative_config",
)  # fmt: skip


def group_of(spec: ConfigField) -> str:
    """Word of the group that a setting is in."""
    by_name = [word for word, group in GROUPS.items() if spec.name in group.names]
    section = spec.owners[0][0]
    return next(iter(by_name), next((word for word, group in GROUPS.items() if section in group.sections), "server"))


def topic_of(arguments: Sequence[str]) -> str | None:
    """What help is asked about: "" for the short page, None where none is asked for."""
    for place, argument in enumerate(arguments):
        if argument == "--":
            return None
        if argument in ("-h", "--help"):
            following = arguments[place + 1 : place + 2]
            return following[0] if following and not following[0].startswith("-") else ""
        if argument.startswith("--help="):
            return argument.removeprefix("--help=")
    return None


def page_of(
    prog: str, usage: str, text: str, own: argparse.ArgumentParser, fields: Mapping[str, ConfigField], topic: str
) -> str:
    """A page of help.

    Args:
        prog: The command, e.g. "quire plan".
        usage: What follows it, on one line.
        text: What it does.
        own: Has the command's own arguments.
        fields: Settings that it takes, too.
        topic: "" for the short page; a group, all, or a word to look for.
    """
    topic = topic.strip().lower()
    if topic == "":
        return _short_page(prog, usage, text, own, fields)
    if topic == "all":
        return "\n".join(_group(word, fields) for word in GROUPS if _members(word, fields))
    word = _group_called(topic)
    if word is not None and _members(word, fields):
        return _group(word, fields)
    return _found(prog, topic, fields)


def _short_page(
    prog: str, usage: str, text: str, own: argparse.ArgumentParser, fields: Mapping[str, ConfigField]
) -> str:
    lines = [f"usage: {prog} {usage}", "", *textwrap.wrap(text, _width()), ""]
    rows = [(_own_flags(action), _own_text(action)) for action in own._actions if action.help != argparse.SUPPRESS]
    lines += [_heading("Arguments"), *_rows(rows), ""] if rows else []
    if not fields:
        return "\n".join(lines)
    if "port" in fields:
        specs = [fields[name] for name in MOST_USED if name in fields]
        lines += [_heading("Most used flags"), *_rows([(usage_text(spec), one_line(spec)) for spec in specs])]
        lines += [*_rows([("--config FILE", "YAML file with settings by name")]), ""]
    else:
        lines += [f"It takes the flags of the engine, too, as `quire serve` does: `{prog} --help=all`.", ""]
    lines.append(_heading("Groups of flags"))
    groups = [word for word in GROUPS if _members(word, fields)]
    lines += _rows([(f"--help={word}", f"{GROUPS[word].title} ({len(_members(word, fields))})") for word in groups])
    lines += _rows([("--help=all", f"all {len(fields)} flags"), ("--help=WORD", "flags that have to do with a word")])
    lines += [
        "",
        "Each flag can also be set in the environment (--max-num-seqs as QUIRE_MAX_NUM_SEQS) or in the file of",
    ]
    lines += [
        "--config; `quire explain NAME` says which value holds. Flags of `vllm serve` are understood or answered."
    ]
    return "\n".join(lines)


def _group_called(topic: str) -> str | None:
    plain = topic.replace("_", "-").replace(" ", "-")
    words = {word: word for word in GROUPS} | {
        group.title.lower().replace(" ", "-"): word for word, group in GROUPS.items()
    }
    return words.get(plain)


def _members(word: str, fields: Mapping[str, ConfigField]) -> list[ConfigField]:
    return [spec for spec in fields.values() if group_of(spec) == word]


def _group(word: str, fields: Mapping[str, ConfigField]) -> str:
    lines = [_heading(f"{GROUPS[word].title}:")]
    for spec in _members(word, fields):
        lines += _entry(spec)
    return "\n".join([*lines, ""])


def _found(prog: str, topic: str, fields: Mapping[str, ConfigField]) -> str:
    """Flags whose name or description has the word; of vLLM's that are none here, what they do."""
    from quire.vllm_settings import VLLM_SETTINGS

    name = topic.lstrip("-").replace("-", "_")
    lines: list[str] = []
    for spec in fields.values():
        if name in spec.name or topic in spec.help.lower():
            lines += _entry(spec)
    others = [each for each in VLLM_SETTINGS if name in each and each not in fields]
    if others:
        lines += ["", _heading("Of vLLM's flags:")] if lines else [_heading("Of vLLM's flags:")]
        lines += _rows([(f"--{each.replace('_', '-')}", VLLM_SETTINGS[each].words) for each in others])
    if lines:
        return "\n".join(lines)
    return f"no flag has to do with {topic!r}; the groups are {', '.join(GROUPS)}, and `{prog} --help=all` shows all"


def _entry(spec: ConfigField) -> list[str]:
    """A flag with everything that there is to say."""
    width = _width()
    text = spec.help
    if spec.choices and not all(f"{choice}" in usage_text(spec) for choice in spec.choices):
        text += f" One of {', '.join(map(str, spec.choices))}."
    if (default := default_text(spec)) is not None:
        text += f" Default: {default}."
    return [f"  {usage_text(spec)}", *textwrap.wrap(text, width, initial_indent=" " * 6, subsequent_indent=" " * 6)]


def one_line(spec: ConfigField) -> str:
    """The first clause of its description, and the default."""
    clause = re.split(r"; |: (?=[^`]*$)|\. (?=[A-Z0-9])", spec.help, maxsplit=1)[0].rstrip(".")
    default = default_text(spec)
    return clause if default is None else f"{clause} (default: {default})"


def usage_text(spec: ConfigField) -> str:
    """A flag and what follows it, e.g. "--max-num-seqs REQUESTS"."""
    kinds = [kind for kind in typing.get_args(spec.type) or (spec.type,) if kind is not type(None)]
    if kinds == [bool]:
        return f"--[no-]{spec.flag.removeprefix('--')}"
    origins = {typing.get_origin(kind) or kind for kind in (*kinds, spec.type)}
    if tuple in origins:
        several = "[,...]" if spec.secret else " ..."  # the flag of a secret takes one value
        return f"{spec.flag} {_value_name(spec)}{several}"
    if dict in origins:
        return f"{spec.flag} JSON"
    listed = ",".join(map(str, spec.choices))
    return f"{spec.flag} {{{listed}}}" if listed and len(listed) <= 40 else f"{spec.flag} {_value_name(spec)}"


def _value_name(spec: ConfigField) -> str:
    return spec.unit.split()[0].upper() if spec.unit else "VALUE"


def default_text(spec: ConfigField) -> str | None:
    """The default for people; None where there is nothing to show."""
    value = spec.default
    if value is None or value == () or value == "":
        return None
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, tuple):
        return " ".join(map(str, value))
    if spec.unit == "bytes" and value % (1 << 20) == 0:
        return f"{value >> 20}MiB"
    number = (
        f"{value:g}"
        if isinstance(value, float) and value < 1e5
        else f"{value:.0f}"
        if isinstance(value, float)
        else str(value)
    )
    return f"{number} {spec.unit}".rstrip() if spec.unit else number


def _own_flags(action: argparse.Action) -> str:
    if not action.option_strings:
        return str(action.dest)
    value = "" if action.nargs == 0 else f" {action.metavar or action.dest.upper()}"
    return f"{', '.join(action.option_strings)}{value}{' ...' if action.nargs == '+' else ''}"


def _own_text(action: argparse.Action) -> str:
    return (action.help or "") + (" (required)" if action.required and action.option_strings else "")


def _rows(rows: Iterable[tuple[str, str]]) -> list[str]:
    """Two columns; a long left side gets a line of its own."""
    lines, column = [], 34
    for left, right in rows:
        wrapped = textwrap.wrap(right, max(30, _width() - column)) or [""]
        if len(left) > column - 4:
            lines.append(f"  {left}")
        else:
            lines.append(f"  {left:<{column - 2}}{wrapped.pop(0)}".rstrip())
        lines += [" " * column + each for each in wrapped]
    return lines


def _width() -> int:
    return min(shutil.get_terminal_size((100, 24)).columns, 110)


def _heading(text: str) -> str:
    shows_bold = sys.stdout.isatty() and "NO_COLOR" not in os.environ
    return f"\x1b[1m{text}\x1b[0m" if shows_bold else text

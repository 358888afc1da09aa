"""Every flag of `vllm serve` is one of Quire's, asks for what is so anyway, or is answered."""

from __future__ import annotations

import json
import re
from pathlib import Path

from quire.config import QuireConfig
from quire.setting_fields import config_fields
from quire.vllm_settings import OTHER_SPELLINGS, VLLM_SETTINGS, is_settled, other_name
from quire_server.command_line import Parser, add_setting_flags
from quire_server.config import ServerConfig

VLLM_FLAGS: dict[str, list[str | None]] = json.loads((Path(__file__).parent / "vllm_flags.json").read_text())
"""Name -> switch or value, vLLM's default, its short flags: what `vllm serve` of vLLM 0.33.0 takes."""

SECTIONS = {**QuireConfig.sections(), "server": ServerConfig}
FIELDS = config_fields(SECTIONS)
COMMAND_LINE_ONLY = {"config", "speculative_config", "optimization_level", "disable_uvicorn_access_log"}


def known_flags() -> dict[str, object]:
    parser = Parser("quire serve")
    add_setting_flags(parser, FIELDS)
    return {flag: action for action in parser._actions for flag in action.option_strings}


def test_each_is_understood_or_answered() -> None:
    assert len(VLLM_FLAGS) == 320
    unknown = [
        name
        for name in VLLM_FLAGS
        if not {name, other_name(name)} & (FIELDS.keys() | VLLM_SETTINGS | COMMAND_LINE_ONLY)
    ]
    assert not unknown
    flags = known_flags()
    for name, (_, _, *shorts) in VLLM_FLAGS.items():
        for flag in (f"--{name.replace('_', '-')}", *shorts):
            assert OTHER_SPELLINGS.get(flag, flag) in flags, flag


def test_switches_are_switches() -> None:
    """Else `--trust-remote-code MODEL` takes the model for its value."""
    flags = known_flags()
    for name, (kind, _, *_) in VLLM_FLAGS.items():
        flag = f"--{name.replace('_', '-')}"
        if name not in COMMAND_LINE_ONLY:
            action = flags[OTHER_SPELLINGS.get(flag, flag)]
            assert (getattr(action, "nargs", None) == 0) == (kind == "switch"), name


def test_what_vllm_does_by_default_is_accepted() -> None:
    for name, (kind, default, *_) in VLLM_FLAGS.items():
        if name in VLLM_SETTINGS:
            assert is_settled(name, default if kind == "value" else default == "True")
            assert is_settled(name, None)


def test_answers_name_flags_that_exist() -> None:
    known = known_flags() | {f"--no-{flag[2:]}": None for flag in known_flags()}
    for setting in VLLM_SETTINGS.values():
        for flag in re.findall(r"(?<![\w-])--[a-z][\w-]*", setting.words):
            assert flag in known, setting.words
            assert flag.removeprefix("--").replace("-", "_") in FIELDS, setting.words
    for ours in OTHER_SPELLINGS.values():
        assert ours in known

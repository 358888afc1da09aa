"""Flags that messages name exist, every one that a literal of the tree names."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from quire.setting_fields import config_fields
from quire.vllm_settings import VLLM_SETTINGS
from quire_interfaces import RequestError
from quire_server.cli import server_sections
from quire_server.errors import naming_fields

ROOT = Path(__file__).parents[3]
FLAG = re.compile(r"(?<![\w-])--[a-z][\w-]*[a-z0-9]")

OTHERS = re.compile("`uv [^`]*`|--flag value")
"""Command lines of other programs, and a placeholder."""


def sources() -> Iterator[ast.AST]:
    for folder in (*ROOT.glob("packages/*/src"), *ROOT.glob("apps/*/src"), *ROOT.glob("kernels-*/src")):
        for path in folder.rglob("*.py"):
            yield ast.parse(path.read_text(encoding="utf-8"), str(path))


def known_flags(trees: list[ast.AST]) -> set[str]:
    """Of settings, and of every argument of a command."""
    flags = {spec.flag for spec in config_fields(server_sections()).values()}
    flags |= {f"--{name.replace('_', '-')}" for name in VLLM_SETTINGS}
    for tree in trees:
        for node in ast.walk(tree):
            names = (getattr(node.func, "attr", ""), getattr(node.func, "id", "")) if isinstance(node, ast.Call) else ()
            if isinstance(node, ast.Call) and {"add_argument", "argument"} & {*names}:
                flags |= {str(each.value) for each in node.args if isinstance(each, ast.Constant)}
    return flags | {flag.replace("--", "--no-", 1) for flag in flags} | {"--help", "--version"}


def test_every_flag_in_a_literal_exists() -> None:
    trees = list(sources())
    known, unknown, found = known_flags(trees), {}, set()
    for tree in trees:
        docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        for node in ast.walk(tree):
            is_text = isinstance(node, ast.Constant) and isinstance(node.value, str) and " " in node.value
            if is_text and id(node) not in docstrings:
                for flag in FLAG.findall(OTHERS.sub("", node.value)):
                    found.add(flag)
                    if flag not in known:
                        unknown[flag] = node.value
    assert {"--max-logprobs", "--enable-lora", "--structured-output-max-bytes"} <= found
    assert not unknown


def test_a_field_s_other_name_leaves_flags_alone() -> None:
    with pytest.raises(RequestError) as error, naming_fields({"logprobs": "top_logprobs"}):
        raise RequestError("logprobs must be at most 20: the server's bound is --max-logprobs", param="logprobs")
    assert str(error.value) == "top_logprobs must be at most 20: the server's bound is --max-logprobs"
    assert error.value.param == "top_logprobs"

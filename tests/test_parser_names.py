"""The table of docs/parsers.md: each name of vLLM and SGLang leads to the format that its row names."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from quire_renderers import ChatFormat
from quire_renderers.reasoning_formats import REASONING_FORMATS
from quire_renderers.tool_formats import TOOL_FORMATS

PAGE = (Path(__file__).parents[1] / "docs" / "parsers.md").read_text()
ROW = re.compile(r"^\| `(?P<ours>[^`]+)` \| (?P<vllm>[^|]+) \| (?P<sglang>[^|]+) \|", re.MULTILINE)


def rows(heading):
    section = PAGE.split(f"## {heading}\n")[1].split("\n## ")[0]
    return {row["ours"]: re.findall("`([^`]+)`", row["vllm"] + row["sglang"]) for row in ROW.finditer(section)}


@pytest.mark.parametrize(
    ("heading", "option", "formats"),
    [("Tool calls", "tool_parser", TOOL_FORMATS), ("Thinking", "reasoning_parser", REASONING_FORMATS)],
)
def test_every_name_leads_to_the_format_of_its_row(heading, option, formats):
    table = rows(heading)
    assert table.keys() == formats.keys()
    for ours, others in table.items():
        for name in (ours, *others):
            assert getattr(ChatFormat(**{option: name}), option) == ours, name


def test_the_table_holds_all_names():
    assert sum(map(len, rows("Tool calls").values())) == 89
    assert sum(map(len, rows("Thinking").values())) == 66

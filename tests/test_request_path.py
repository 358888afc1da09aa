"""docs/request-path.md names the files that carry a request, and they are few."""

from __future__ import annotations

import asyncio
import re

from request_trace import ROOT, trace_request

PAGE = ROOT / "docs" / "request-path.md"
MOST_FILES = 9


def test_the_page_lists_the_files_that_carry_a_request() -> None:
    way = PAGE.read_text().partition("\n| file |")[0]
    numbered = re.findall(r"^\| (\d+) \| `([^`]+)` \|", way, re.MULTILINE)
    files = asyncio.run(trace_request())
    assert [(str(number), file) for number, file in enumerate(files, 1)] == numbered
    assert len(files) <= MOST_FILES

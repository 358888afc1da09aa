"""Each test draws the same numbers whenever it runs: torch begins each process with others."""

from __future__ import annotations

import sys
import zlib

import pytest


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Seed torch from the test's name; a test without torch does not load it."""
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.manual_seed(zlib.crc32(item.nodeid.encode()))

"""Each test draws the same numbers whenever it runs, and what it leaves open is told of where that was."""

from __future__ import annotations

import gc
import sys
import zlib

import pytest


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Seed torch from the test's name; a test without torch does not load it."""
    torch = sys.modules.get("torch")
    if torch is not None:
        torch.manual_seed(zlib.crc32(item.nodeid.encode()))


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> None:
    """Collect garbage at a module's end: a socket that nobody closed would fail a test of another module later."""
    if nextitem is None or nextitem.path != item.path:
        gc.collect()

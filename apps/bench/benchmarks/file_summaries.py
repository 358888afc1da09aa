"""A plug-in of pytest: a line of JSON for each test file as soon as its last test has run, in a file that is named by
`--file-summaries`.

A run that is cut short leaves the lines of what had ended, and where pytest could still end by itself, those of files
that were half done. With pytest-xdist the lines are written by the process that the workers report to.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

FAILURE_LINES = 14
"""Of a failure's text, the last ones."""
MAX_FAILURES = 8
"""Failures of a file that are told with their text."""


class FileSummaries:
    """Counts what was reported of each file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        path.write_text("")
        self._num_tests: Counter[str] = Counter()
        self._files: dict[str, dict[str, Any]] = {}
        self._written: set[str] = set()

    def pytest_collection_finish(self, session: Any) -> None:
        """Count the tests of each file."""
        self._num_tests = self._num_tests or Counter(item.nodeid.partition("::")[0] for item in session.items)

    def pytest_xdist_node_collection_finished(self, node: Any, ids: list[str]) -> None:
        """The same, where workers have collected them."""
        self._num_tests = Counter(each.partition("::")[0] for each in ids)

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Count one test's part: setting it up, running it, taking it down."""
        file = report.nodeid.partition("::")[0]
        counts = self._files.setdefault(
            file, {"passed": 0, "failed": 0, "skipped": 0, "seconds": 0.0, "failures": [], "num_done": 0}
        )
        counts["seconds"] += report.duration
        if report.failed:
            counts["failed"] += 1
            lines = str(report.longrepr).strip().splitlines()[-FAILURE_LINES:]
            told = len(counts["failures"]) < MAX_FAILURES
            counts["failures"].append([report.nodeid, *lines] if told else report.nodeid)
        elif report.skipped:
            counts["skipped"] += 1
        elif report.when == "call":
            counts["passed"] += 1
        if report.when == "teardown":
            counts["num_done"] += 1
            if counts["num_done"] == self._num_tests[file]:
                self._write(file)

    def pytest_sessionfinish(self) -> None:
        """Tell what was half done."""
        for file in self._files:
            if file not in self._written:
                self._write(file)

    def _write(self, file: str) -> None:
        self._written.add(file)
        counts = dict(self._files[file])
        counts["seconds"] = round(counts["seconds"], 1)
        counts["not_run"] = self._num_tests[file] - counts.pop("num_done")
        with self._path.open("a") as out:
            out.write(json.dumps({"file": Path(file).stem, **counts}) + "\n")


def pytest_addoption(parser: Any) -> None:
    """The option."""
    parser.addoption("--file-summaries", type=Path, help="file for a line of JSON for each test file")


def pytest_configure(config: Any) -> None:
    """Count in the process that reports."""
    path = config.getoption("--file-summaries")
    if path is not None and not hasattr(config, "workerinput"):
        config.pluginmanager.register(FileSummaries(path), "file-summaries")

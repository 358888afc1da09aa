"""A small part of what `nox -s schemathesis` sends to every operation of a server: no 5xx, no hang."""

from __future__ import annotations

import runpy
from pathlib import Path

RUN = runpy.run_path(str(Path(__file__).with_name("fuzz") / "run.py"), run_name="fuzz")


def test_no_request_ends_in_a_failure_of_the_server() -> None:
    with RUN["serve"]() as url:
        report = RUN["fuzz"](url, 200)
    assert report.num_requests >= 200
    assert not report.failures
    assert report.statuses[200] > 20, "nothing was asked that has an answer"
    assert report.statuses[400] > 20, "nothing was asked that is wrong"

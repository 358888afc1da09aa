"""Breeds requests to every operation of the API from its own document, and fails where one ends in a 5xx or a hang.

    nox -s schemathesis                      2,000 requests to a server of the demo model with every route
    nox -s schemathesis -- 10000             as many as that
    nox -s schemathesis -- 500 --url http://127.0.0.1:8000      to a server that runs already
    nox -s schemathesis -- 500 --seed 7      other requests

Half of the requests obey the document, half do not. What a request is answered beyond that is tested by the server's
own tests.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import httpx
import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis.errors import Unsatisfiable
from schemathesis.generation import GenerationMode

SWITCHES = (
    "--enable-admin-routes", "--enable-sleep-mode", "--enable-tokenizer-info-endpoint", "--enable-kv-cache-events",
)  # fmt: skip
SMALL = ("--max-model-len", "256", "--max-num-seqs", "8", "--response-store", ":memory:")
"""Short answers, so that the time goes into requests."""
RESTING = {
    "/pause": "/resume",
    "/pause_generation": "/continue_generation",
    "/release_memory_occupation": "/resume_memory_occupation",
    "/sleep": "/wake_up",
}
"""After these a server takes no requests; each is undone at once."""
ENDLESS = ("/v1/engine/events",)
"""Answers that end when the client leaves, or after as many events as it asks for."""
_TIMEOUT_S = 120


@dataclass(slots=True)
class Report:
    """What the requests were answered."""

    statuses: Counter[int] = field(default_factory=Counter)
    failures: dict[str, str] = field(default_factory=dict)
    """Operation and fault -> the first request that showed it."""

    @property
    def num_requests(self) -> int:
        """All that were sent."""
        return self.statuses.total()


def fuzz(url: str, num_requests: int, first_seed: int = 0) -> Report:
    """Send `num_requests`, about equally many to each operation.

    Raises:
        RuntimeError: The server does not live on.
    """
    report = Report()
    with httpx.Client(base_url=url, timeout=_TIMEOUT_S) as client:
        schema = schemathesis.openapi.from_dict(client.get("/openapi.json").json())
        there = _make_objects(client)
        operations = [each.ok() for each in schema.get_all_operations()]
        operations.sort(key=lambda each: each.method == "delete")  # what is deleted is there no longer
        halves = [(each, mode) for each in operations for mode in GenerationMode]
        while report.num_requests < num_requests:  # of some operations there are few different requests
            share = max(1, (num_requests - report.num_requests) // len(halves))
            for operation, mode in halves[: num_requests - report.num_requests]:
                names = next((names for root, names in there.items() if operation.path.startswith(root)), {})
                _send(client, operation, mode, share, first_seed, names, report)
                if client.get("/health").status_code != 200:
                    raise RuntimeError(f"the server is ill after {operation.label}: {report.failures}")
            first_seed += 1
    return report


def _make_objects(client: httpx.Client) -> dict[str, dict[str, str]]:
    """Beginnings of paths -> parameters that name what is there."""
    conversation = client.post("/v1/conversations", json={"items": [{"role": "user", "content": "x"}]}).json()["id"]
    item = client.get(f"/v1/conversations/{conversation}/items").json()["data"][0]["id"]
    response = client.post("/v1/responses", json={"input": "x", "max_output_tokens": 16}).json()["id"]
    model = client.get("/v1/models").json()["data"][0]["id"]
    return {
        "/v1/conversations/": {"id": conversation, "item": item},
        "/v1/responses/": {"id": response},
        "/v1/models/": {"name": model},
    }


def _send(
    client: httpx.Client,
    operation: Any,
    mode: GenerationMode,
    num_requests: int,
    first_seed: int,
    names: dict[str, str],
    report: Report,
) -> None:
    count = 0

    @seed(first_seed)
    @given(case=operation.as_strategy(generation_mode=mode))
    @settings(
        max_examples=num_requests,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    def send(case: Any) -> None:
        nonlocal count
        count += 1
        if count % 2 and names:
            case.path_parameters.update({name: names[name] for name in case.path_parameters if name in names})
        if operation.path in ENDLESS:
            case.query = {**(case.query or {}), "num_events": "1"}
        try:
            response = case.call(base_url=str(client.base_url), timeout=_TIMEOUT_S)
        except Exception as error:  # a closed connection and a hang are faults like a 5xx
            status, told = 0, f"{type(error).__name__}: {error}"
        else:
            status, told = response.status_code, response.text
        report.statuses[status] += 1
        if status == 0 or status >= 500:
            fault = f"{operation.label}: {status} {re.sub('[0-9a-f]{8,}', 'ID', told)[:300]}"
            report.failures.setdefault(fault, case.as_curl_command())
        if operation.path in RESTING:
            client.post(RESTING[operation.path], json={}).raise_for_status()

    with suppress(Unsatisfiable):  # what takes no parameter can be asked nothing wrong
        send()


@contextmanager
def serve() -> Iterator[str]:
    """A server of the demo model with every route, and its address."""
    with tempfile.TemporaryFile("w+") as log:
        command = [sys.executable, "-m", "quire_server.cli", "serve", "--port", "0", *SWITCHES, *SMALL]
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, text=True)
        try:
            yield _address(process, log)
        finally:
            process.terminate()
            process.wait(60)


def _address(process: subprocess.Popen[str], log: Any) -> str:
    while process.poll() is None:
        log.seek(0)
        if found := re.search(r"OpenAI API:\s+(http://\S+)/v1", log.read()):
            return found[1]
        time.sleep(0.1)
    log.seek(0)
    raise RuntimeError(f"the server did not start: {log.read()}")


def main() -> int:
    parser = argparse.ArgumentParser(description="Send requests bred from the API's own document to a server.")
    parser.add_argument("requests", nargs="?", type=int, default=2000, help="how many")
    parser.add_argument("--url", help="a server that runs, with its admin routes on; without it one is started")
    parser.add_argument("--seed", type=int, default=0, help="which requests")
    options = parser.parse_args()
    if options.url:
        report = fuzz(options.url, options.requests, options.seed)
    else:
        with serve() as url:
            report = fuzz(url, options.requests, options.seed)
    print(json.dumps({"requests": report.num_requests, "statuses": dict(sorted(report.statuses.items()))}))
    for fault, command in report.failures.items():
        print(f"\n{fault}\n  {command[:2000]}")
    return 1 if report.failures else 0


if __name__ == "__main__":
    sys.exit(main())

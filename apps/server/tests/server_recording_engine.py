"""The fake engine, which writes down what its scheduler was given: a line of JSON for each request."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from quire_engine import EngineParts
from quire_interfaces import Request
from quire_testkit.fake_engine import fake_engine_factory


def factory(config: Mapping[str, Any], report: Callable[[str, float], None]) -> EngineParts:
    """Fields of `FakeEngineConfig`, and `record`: the file to write to."""
    values = dict(config)
    path = Path(values.pop("record"))
    parts = fake_engine_factory(values, report)
    scheduler: Any = parts.scheduler
    add_request = scheduler.add_request

    def recorded(request: Request) -> None:
        with path.open("a") as file:
            options = request.options
            fields = {"tenant": options.tenant, "cache_salt": options.cache_salt, "priority": options.priority}
            pooling_params = request.pooling_params
            fields["task"] = None if pooling_params is None else pooling_params.task
            file.write(json.dumps(fields) + "\n")
        add_request(request)

    scheduler.add_request = recorded
    return parts

"""An engine without weights whose faults are asked for by a token in the prompt, and which may be slow to start again.

Imported by engine processes that the tests start.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from quire_engine import EngineParts
from quire_interfaces import ModelRunnerOutput, SchedulerOutput
from quire_testkit.fake_engine import fake_engine_factory
from quire_testkit.fake_runner import FakeExecutor


class FaultyByPrompt:
    """An `Executor` over the fake one."""

    def __init__(self, inner: FakeExecutor, *, fails: int, raises: int, exits: int) -> None:
        self._inner = inner
        self._fails, self._raises, self._exits = fails, raises, exits

    def execute(self, output: SchedulerOutput) -> Future[ModelRunnerOutput]:
        for new in output.new_rows:
            prompt = new.token_ids[: new.num_prompt_tokens]
            if self._fails in prompt:
                self._inner.runner.fail_on[new.request_id] = "asked to fail"
            if self._raises in prompt:
                self._inner.runner.raise_on.add(new.request_id)
            if self._exits in prompt:
                os._exit(3)
        return self._inner.execute(output)

    def close(self) -> None:
        self._inner.close()


def factory(config: dict[str, Any], report: Callable[[str, float], None]) -> EngineParts:
    """`config` as for the fake engine, with `faults` (token ids by name), `marker` (a file that says that this engine
    was started before) and `restart_s` (seconds that every later start takes longer)."""
    values = dict(config)
    faults, marker, restart_s = values.pop("faults"), Path(values.pop("marker")), values.pop("restart_s", 0.0)
    if marker.exists():
        time.sleep(restart_s)
    marker.touch()
    parts = fake_engine_factory(values, report)
    assert isinstance(parts.executor, FakeExecutor)
    parts.executor = FaultyByPrompt(parts.executor, **faults)
    return parts

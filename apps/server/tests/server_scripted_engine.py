"""An engine without weights that says what its prompt asks for: the text between ¤ and ¥, where they stand last.

Scheduler, KV cache and the checks of the fake runner are the real ones. Imported by engine processes that tests start.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from quire_engine import EngineParts
from quire_testkit.fake_engine import fake_engine_factory
from quire_testkit.fake_runner import FakeExecutor, FakeRunner


class ScriptedRunner(FakeRunner):
    """A `FakeRunner` whose samples are the script of the row's prompt, then the end token."""

    begin: list[int]
    end: list[int]
    stop: int

    def _verify(self, row: Any, drafts: list[int], num_known: int) -> list[int]:
        assert not drafts
        prompt = row.token_ids[: row.num_prompt_tokens]
        first, last = self._last(prompt, self.begin), self._last(prompt, self.end)
        script = prompt[first + len(self.begin) : last] if 0 <= first < last else []
        place = len(row.token_ids) - row.num_prompt_tokens
        row.token_ids.append(script[place] if place < len(script) else self.stop)
        return row.token_ids[-1:]

    @staticmethod
    def _last(ids: list[int], wanted: list[int]) -> int:
        places = (
            start for start in range(len(ids) - len(wanted), -1, -1) if ids[start : start + len(wanted)] == wanted
        )
        return next(places, -1)


def factory(config: dict[str, Any], report: Callable[[str, float], None]) -> EngineParts:
    """`config` as for the fake engine, with `script` (token ids of ¤, of ¥, and the end token)."""
    values = dict(config)
    script = values.pop("script")
    parts = fake_engine_factory(values, report)
    assert isinstance(parts.executor, FakeExecutor)
    runner = parts.executor.runner
    runner.__class__ = ScriptedRunner
    assert isinstance(runner, ScriptedRunner)
    runner.begin, runner.end, runner.stop = script
    return parts

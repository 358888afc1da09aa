"""An engine without weights that follows rules: what it says depends on which known text stands last in its prompt.

Scheduler, KV cache and the checks of the fake runner are the real ones. Imported by the engine process of the scripted
server.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from quire_engine import EngineParts
from quire_renderers import load_tokenizer
from quire_testkit.fake_engine import fake_engine_factory
from quire_testkit.fake_runner import FakeExecutor, FakeRunner

FACTORY = "rule_engine:rule_engine_factory"


class RuleRunner(FakeRunner):
    """A `FakeRunner` whose samples are the text of a rule, then the end token."""

    tokenizer: Any
    rules: list[tuple[str, str]]
    """(text in a prompt, what is said then); "" for any other prompt."""
    end_token_id: int
    said: dict[int, list[int]]

    def _verify(self, row: Any, drafts: list[int], num_known: int) -> list[int]:
        assert not drafts
        place = len(row.token_ids) - row.num_prompt_tokens
        if place == 0 or id(row) not in self.said:
            prompt = self.tokenizer.decode(row.token_ids[: row.num_prompt_tokens])
            self.said[id(row)] = self.tokenizer.encode(self._answer(prompt), add_special_tokens=False)
        script = self.said[id(row)]
        row.token_ids.append(script[place] if place < len(script) else self.end_token_id)
        return row.token_ids[-1:]

    def _answer(self, prompt: str) -> str:
        found = [(prompt.rfind(known), -index, text) for index, (known, text) in enumerate(self.rules) if known]
        place, _, text = max(found, default=(-1, 0, ""))
        return text if place >= 0 else next((text for known, text in self.rules if not known), "Fine.")


def rule_engine_factory(config: dict[str, Any], report: Callable[[str, float], None]) -> EngineParts:
    """`config` as for the fake engine, with `model` (the folder of a tokenizer), `rules` and `end_token_id`."""
    values = dict(config)
    model, rules, end = values.pop("model"), values.pop("rules"), values.pop("end_token_id")
    parts = fake_engine_factory(values, report)
    assert isinstance(parts.executor, FakeExecutor)
    runner = parts.executor.runner
    runner.__class__ = RuleRunner
    assert isinstance(runner, RuleRunner)
    runner.tokenizer, runner.rules, runner.end_token_id = load_tokenizer(model), [tuple(rule) for rule in rules], end
    runner.said = {}
    return parts

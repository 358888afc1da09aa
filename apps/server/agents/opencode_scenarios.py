"""opencode, out of the box, over chat completions by the AI SDK."""

from __future__ import annotations

import json
from typing import Any

import pytest

PACKAGE = "opencode-linux-x64-baseline"
"""The program itself; the package `opencode-ai` puts it in its place by a script when it is installed."""


@pytest.fixture
def opencode(installed: Any, workplace: Any) -> Any:
    """Makes an opencode that talks to a model with these rules: (the workplace, what runs `opencode run`)."""
    program = installed("opencode").parent / PACKAGE / "bin" / "opencode"

    def make(rules: list[tuple[str, str]], **settings: Any) -> tuple[Any, Any]:
        place = workplace(rules, **settings)
        model = {"name": "demo", "limit": {"context": 131072, "output": 4096}, "tool_call": True}
        provider = {
            "npm": "@ai-sdk/openai-compatible",
            "options": {"baseURL": f"{place.url}/v1", "apiKey": "none"},
            "models": {"demo": model},
        }
        config = {
            "provider": {"quire": provider},
            "model": "quire/demo",
            "small_model": "quire/demo",
            "share": "disabled",
        }
        config |= {"autoupdate": False, "permission": {"edit": "allow", "bash": "allow"}}
        (place.work / "opencode.json").write_text(json.dumps(config))

        def run(*arguments: str) -> str:
            return place.run([str(program), "run", *arguments], OPENCODE_DISABLE_MODELS_FETCH="1")

        return place, run

    return make


def test_text(opencode: Any) -> None:
    place, run = opencode([("Greet me.", "Hello from the model."), ("", "A greeting")])
    assert "Hello from the model." in run("Greet me.")
    assert {each.status for each in place.exchanges if each.path == "/v1/chat/completions"} == {200}


def test_tool_loop(opencode: Any) -> None:
    call = json.dumps({"name": "bash", "arguments": {"command": "echo from-$((40+2))", "description": "Says a number"}})
    place, run = opencode(
        [
            ("Ask the shell.", f"<tool_call>\n{call}\n</tool_call>"),
            ("from-42", "The shell said forty-two."),
            ("", "A shell"),
        ]
    )
    assert "The shell said forty-two." in run("Ask the shell.")
    last = place.bodies("/v1/chat/completions")[-1]["messages"]
    assert any(each["role"] == "tool" and "from-42" in json.dumps(each) for each in last)

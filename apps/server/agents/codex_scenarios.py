"""Codex CLI, out of the box, over the Responses API."""

from __future__ import annotations

import json
from typing import Any

import pytest


def call(name: str, **arguments: Any) -> str:
    """What a model writes to call a tool."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


@pytest.fixture
def codex(installed: Any, workplace: Any) -> Any:
    """Makes a Codex that talks to a model with these rules: (the workplace, what runs `codex exec`)."""
    program = installed("codex") / "codex"

    def make(rules: list[tuple[str, str]], *config: str, built_in: bool = False, **settings: Any) -> tuple[Any, Any]:
        place = workplace(rules, **settings)
        own = f'{{name="quire",base_url="{place.url}/v1",wire_api="responses",env_key="SERVER_KEY"}}'
        provider = ["model_provider=quire", f"model_providers.quire={own}"]
        if built_in:  # OpenAI's, at another address
            provider = [f'openai_base_url="{place.url}/v1"']
        options = [*provider, "analytics.enabled=false", "check_for_update_on_startup=false", *config]

        def run(*arguments: str, command: tuple[str, ...] = ()) -> str:
            flags = [flag for option in options for flag in ("-c", option)]
            own = ["--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", "-m", "demo"]
            codex_home = place.home / ".codex"
            codex_home.mkdir(exist_ok=True)
            line = [str(program), "exec", *command, *own, *flags, *arguments]
            return place.run(line, CODEX_HOME=str(codex_home), SERVER_KEY="none", CODEX_API_KEY="none")

        return place, run

    return make


def test_text(codex: Any) -> None:
    place, run = codex([("Greet me.", "Hello from the model.")])
    assert "Hello from the model." in run("Greet me.")
    assert [each.status for each in place.exchanges if each.path == "/v1/responses"] == [200]


def test_tool_loop(codex: Any) -> None:
    place, run = codex(
        [
            (
                "Which files are here?",
                f"<think>I look.</think>{call('exec_command', cmd='echo found-$((20 + 3)); ls')}",
            ),
            ("found-23", "There is one image."),
        ]
    )
    assert "There is one image." in run("Which files are here?")
    first, second = place.bodies("/v1/responses")
    kinds = [item["type"] for item in second["input"][len(first["input"]) :]]
    assert kinds[-2:] == ["function_call", "function_call_output"], kinds
    assert "pixel.png" in json.dumps(second["input"][-1])


def test_image_in_the_result_of_a_tool(codex: Any) -> None:
    place, run = codex(
        [
            ("Look at the image.", call("view_image", path="pixel.png")),
            ("image left out", "I cannot see images."),
        ]
    )
    assert "I cannot see images." in run("Look at the image.")
    assert "input_image" in json.dumps(place.bodies("/v1/responses")[-1]["input"][-1])


def test_resume(codex: Any) -> None:
    place, run = codex([("Remember 7.", "<think>Seven.</think>I do."), ("What was it?", "It was 7.")])
    assert "I do." in run("Remember 7.")
    assert "It was 7." in run("What was it?", command=("resume", "--last"))
    kinds = [item["type"] for item in place.bodies("/v1/responses")[-1]["input"]]
    assert "reasoning" in kinds


def test_compaction(codex: Any) -> None:
    place, run = codex(
        [("Remember 7.", "I do."), ("What was it?", "It was 7."), ("CHECKPOINT", "SUMMARY: remember 7.")],
        "model_auto_compact_token_limit=100",
    )
    assert "I do." in run("Remember 7.")
    assert "It was 7." in run("What was it?", command=("resume", "--last"))
    _, asked, after = place.bodies("/v1/responses")
    assert "CHECKPOINT" in json.dumps(asked["input"][-1])
    assert "SUMMARY: remember 7." in json.dumps(after["input"][-2])
    assert "I do." not in json.dumps(after["input"])


def test_compaction_by_the_server(codex: Any) -> None:
    """On OpenAI's own provider Codex asks the server for the summary."""
    place, run = codex(
        [
            ("Remember 7.", "I do."),
            ("What was it?", "It was 7."),
            ("Summarize the conversation", "SUMMARY: remember 7."),
        ],
        "model_auto_compact_token_limit=100",
        built_in=True,
    )
    assert "I do." in run("Remember 7.")
    assert "It was 7." in run("What was it?", command=("resume", "--last"))
    # Its websocket gets no answer from the proxy between, so it goes on over HTTP.
    _, asked, after = (body["input"] for body in place.bodies("/v1/responses") if body)
    assert asked[-1] == {"type": "compaction_trigger"}
    assert [item["type"] for item in after[-2:]] == ["compaction", "message"]
    assert "I do." not in json.dumps(after)

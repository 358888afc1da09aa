"""Claude Code, out of the box, over Anthropic's Messages API."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

SUMMARIZE, SUMMARY = "detailed summary", "<summary>They said 7.</summary>"
"""What it asks for when it makes a conversation shorter, and an answer."""


def call(name: str, **arguments: Any) -> str:
    """What a model writes to call a tool."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


@pytest.fixture
def claude(installed: Any, workplace: Any) -> Any:
    """Makes a Claude Code that talks to a model with these rules: (the workplace, what runs `claude -p`)."""
    # Its install script would put the program of this machine into its place.
    packages: Path = installed("claude-code").parent / "@anthropic-ai"
    (program,) = packages.glob("claude-code-*/claude*")

    def make(rules: list[tuple[str, str]], **settings: Any) -> tuple[Any, Any]:
        place = workplace(rules, **settings)

        def run(*arguments: str) -> dict[str, Any]:
            environment = {
                "ANTHROPIC_BASE_URL": place.url,
                "ANTHROPIC_API_KEY": "none",
                "ANTHROPIC_MODEL": "demo",
                "ANTHROPIC_DEFAULT_HAIKU_MODEL": "demo",
                "CLAUDE_CONFIG_DIR": str(place.home / ".claude"),
                "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
                "DISABLE_TELEMETRY": "1",
                "DISABLE_AUTOUPDATER": "1",
                "IS_SANDBOX": "1",
            }
            own = ["-p", "--output-format", "json", "--dangerously-skip-permissions"]
            told = place.run([str(program), *own, *arguments], **environment)
            result: dict[str, Any] = json.loads(told.splitlines()[-1])
            return result

        return place, run

    return make


def test_text(claude: Any) -> None:
    place, run = claude([("Greet me.", "Hello from the model.")])
    assert run("Greet me.")["result"] == "Hello from the model."
    assert {each.status for each in place.exchanges} == {200}


def test_tool_loop(claude: Any) -> None:
    look = call("Bash", command="echo found-$((20 + 3)); ls", description="Looks")
    place, run = claude(
        [("Which files are here?", f"<think>I look.</think>{look}"), ("found-23", "There is an image.")]
    )
    assert run("Which files are here?")["result"] == "There is an image."
    blocks = place.bodies("/v1/messages")[-1]["messages"]
    kinds = [block["type"] for message in blocks for block in message["content"] if isinstance(block, dict)]
    assert [kind for kind in kinds if kind.startswith("tool_")] == ["tool_use", "tool_result"]
    assert "pixel.png" in json.dumps(blocks)


def test_image_in_the_result_of_a_tool(claude: Any, tmp_path: Path) -> None:
    """The conversation goes on behind it, too."""
    read = call("Read", file_path=str(tmp_path / "work" / "pixel.png"))
    rules = [("Look at the image.", read), ("image left out", "I cannot see it."), ("What was it?", "An image.")]
    place, run = claude(rules)
    assert run("Look at the image.")["result"] == "I cannot see it."
    assert '"type": "image"' in json.dumps(place.bodies("/v1/messages")[-1])
    assert run("--continue", "What was it?")["result"] == "An image."
    assert '"type": "image"' in json.dumps(place.bodies("/v1/messages")[-1])


def test_resume(claude: Any) -> None:
    place, run = claude([("Remember 7.", "<think>Seven.</think>I do."), ("What was it?", "It was 7.")])
    session = run("Remember 7.")["session_id"]
    assert run("--resume", session, "What was it?")["result"] == "It was 7."
    texts = json.dumps(place.bodies("/v1/messages")[-1]["messages"])
    assert "Remember 7." in texts
    assert "I do." in texts


def test_compact_command(claude: Any) -> None:
    rules = [("Remember 7.", "I do."), (SUMMARIZE, SUMMARY), ("Was it?", "It was 7.")]
    place, run = claude(rules)
    run("Remember 7.")
    assert not run("--continue", "/compact")["is_error"]
    assert run("--continue", "Was it?")["result"] == "It was 7."
    texts = json.dumps(place.bodies("/v1/messages")[-1]["messages"])
    assert "They said 7." in texts
    assert "I do." not in texts


def test_full_context(claude: Any) -> None:
    """It is told that the prompt is too long, makes a summary of what was said, and goes on."""
    rules = [(SUMMARIZE, SUMMARY), ("Was it?", "It was 7."), ("", "Yes.")]
    place, run = claude(rules, max_model_len=60_000)
    long = "many words " * 3000
    for flags in ([], ["--continue"], ["--continue"]):
        assert run(*flags, f"Remember 7. {long}")["result"] == "Yes."
    assert {each.status for each in place.exchanges} == {200}
    assert run("--continue", f"{long} Was it?")["result"] == "It was 7."
    statuses = [each.status for each in place.exchanges[3:]]
    assert statuses[0] == 400
    assert statuses[-1] == 200
    assert "They said 7." in json.dumps(place.bodies("/v1/messages")[-1]["messages"])


def test_tools_that_are_searched_for(claude: Any) -> None:
    """A tool is described where it was found, so that the prefix cache goes on holding what was before."""
    rules = [
        ("Find it.", call("ToolSearch", query="select:CronList")),
        ('"name": "CronList"', call("CronList")),
        ("No scheduled jobs", "There are none."),
    ]
    place, run = claude(rules)
    result = run("Find it.")
    assert result["result"] == "There are none."
    bodies = place.bodies("/v1/messages")
    assert [{tool["name"] for tool in body["tools"]} >= {"CronList"} for body in bodies] == [False, True, True]
    blocks = [block for block in bodies[1]["messages"][-1]["content"] if block["type"] == "tool_result"]
    assert blocks[0]["content"] == [{"type": "tool_reference", "tool_name": "CronList"}]
    usage = result["usage"]
    assert usage["cache_read_input_tokens"] > 1.9 * usage["cache_creation_input_tokens"]

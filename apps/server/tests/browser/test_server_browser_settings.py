"""Settings of the page: models, sampling, presets, prompts, forms, tools, token probabilities."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from selenium.webdriver.common.keys import Keys

TOOLS = str(Path(__file__).parents[1] / "server_mcp_tools.py")


def test_every_sampling_parameter_reaches_the_request(page: Any, served: Any) -> None:
    page.find("#show-settings").click()
    numbers = served.client.get("/chat_settings").json()["sampling"]
    values: dict[str, Any] = {}
    for number in numbers:
        name, low, high = number["name"], number["low"], number["high"]
        values[name] = max(low, 1) if number["whole"] else (min(high, 1) if number["above"] else max(low, 0.5))
    values |= {"presence_penalty": 0.5, "frequency_penalty": 0.5, "mirostat_mode": 0, "seed": 7, "min_tokens": 1}
    for name, value in values.items():
        page.set(f"#{name}", str(value))
    others = {
        "max_completion_tokens": ("4", 4),
        "stop": ("a\nb\\n", ["a", "b\n"]),
        "stop_token_ids": ("5, 6", [5, 6]),
        "truncate_prompt_tokens": ("100", 100),
        "truncation_side": ("left", "left"),
        "reasoning_effort": ("low", "low"),
        "thinking_token_budget": ("9", 9),
        "dry_sequence_breakers": ("x", ["x"]),
        "logit_bias": ('{"7": 1.5}', {"7": 1.5}),
        "bad_words": ("bad", ["bad"]),
        "allowed_token_ids": ("7 8 9", [7, 8, 9]),
        "skip_special_tokens": ("off", False),
        "other": ('{"user": "me"}', None),
    }
    for name, (text, _) in others.items():
        page.set(f"#{name}", text)
    page.set("#enable_thinking", "off")
    page.set("#chat_template_kwargs", '{"tone": "dry"}')
    for name in ("ignore_eos", "include_stop_str_in_output", "deterministic"):
        page.run("arguments[0].click();", page.find(f"#{name}"))
    page.ask("hello")
    body = page.sent()[-1]
    assert {name: body[name] for name in values} == values
    assert {name: body[name] for name in others if name != "other"} == {
        name: value for name, (_, value) in others.items() if name != "other"
    }
    assert body["chat_template_kwargs"] == {"enable_thinking": False, "thinking": False, "tone": "dry"}
    assert (body["ignore_eos"], body["include_stop_str_in_output"], body["deterministic"]) == (True, True, True)
    assert body["user"] == "me"
    refusal = page.find(".message.failed .error").text
    assert refusal.startswith("this engine cannot promise the same tokens"), "nothing but deterministic is refused here"
    page.find("#reset").click()
    page.send("again")
    page.wait(lambda: len(page.sent()) == 2)
    page.keys(Keys.ESCAPE)
    page.wait_done()
    assert not set(values) - {"temperature"} & set(page.sent()[-1])
    assert page.sent()[-1]["temperature"] == 0, "the model recommends nothing"


def test_presets_are_chosen_saved_and_kept(page: Any) -> None:
    page.set("#preset", "Creative")
    assert page.find("#temperature").get_attribute("value") == "1.1"
    page.set("#top_k", "5")
    assert page.find("#top_k").get_attribute("value") == "5"
    page.find("#preset-name").send_keys("Mine")
    page.find("#save-preset").click()
    page.set("#preset", "Model's own")
    assert page.find("#temperature").get_attribute("value") == ""
    page.driver.refresh()
    page.wait_connected()
    page.set("#preset", "Mine")
    assert page.find("#top_k").get_attribute("value") == "5"
    page.set("#max_completion_tokens", "3")
    page.ask("hello")
    body = page.sent()[-1]
    assert (body["temperature"], body["min_p"], body["top_k"]) == (1.1, 0.05, 5)
    page.set("#preset", "Mine")
    page.find("#forget-preset").click()
    assert "Mine" not in page.find("#preset").text


def test_system_prompts_belong_to_a_chat_and_can_be_saved(page: Any) -> None:
    page.set("#max_completion_tokens", "3")
    page.set("#system", "You are a poet.")
    page.find("#save-prompt").click()
    page.ask("hello")
    page.find("#new").click()
    page.set("#max_completion_tokens", "3")
    assert page.find("#system").get_attribute("value") == ""
    page.set("#prompts", "You are a poet.")
    assert page.find("#system").get_attribute("value") == "You are a poet."
    page.ask("again")
    assert page.messages()[0] == {"role": "system", "content": "You are a poet."}
    page.driver.refresh()
    page.wait_connected()
    page.find("#conversations .title").click()
    page.find("#show-settings").click()
    assert page.find("#system").get_attribute("value") == "You are a poet."


@pytest.fixture(scope="module")
def tooled(make_scripted: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    path = tmp_path_factory.mktemp("mcp") / "servers.json"
    path.write_text(json.dumps({"mcpServers": {"tools": {"command": sys.executable, "args": [TOOLS]}}}))
    return make_scripted(mcp_servers=str(path), engine={"max_model_len": 4096})


CALL = '¤I look.\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>¥'


def test_tools_of_a_server_are_switched_on_per_chat_and_wait_for_approval(open_page: Any, tooled: Any) -> None:
    page = open_page(f"{tooled.url}/")
    page.set("#other", '{"max_tool_calls": 1}')
    page.find("#server-tools").click()
    page.ask(CALL)
    assert page.sent()[-1]["tools"] == [{"type": "mcp", "server_label": "tools", "require_approval": "always"}]
    assert page.find(".tool-call .state").text == "waits for approval"
    page.find(".tool-call .approval .primary").click()
    page.wait_done()
    first = page.find(".tool-call")
    page.wait(lambda: "done" in page.find(".tool-call .state").text)
    page.run("arguments[0].open = true;", first)
    assert page.texts(".tool-call:first-of-type section:last-child pre")[0] == "Sunny in Paris"
    assert page.find(".tool-call .server").text == "of tools"
    page.find("#new").click()
    page.find("#server-tools")
    page.ask("¤plain¥")
    assert "messages" in page.sent()[-1], "another chat has no tools"
    page.find("#server-tools").click()
    page.find("#asks-tools").click()
    page.ask(CALL)
    assert page.sent()[-1]["tools"][0]["require_approval"] == "never"
    page.wait(lambda: page.find(".tool-call .state").text == "done")
    assert page.texts(".tool-call .approval") == []
    assert page.errors() == []


def test_a_refused_call_is_not_run(open_page: Any, tooled: Any) -> None:
    page = open_page(f"{tooled.url}/")
    page.set("#preset", "Precise")
    page.find("#server-tools").click()
    page.ask(CALL)
    page.find(".tool-call .approval button:last-child").click()
    page.wait_done()
    assert page.find(".tool-call .state").text == "refused"
    refusal = next(each for each in page.sent()[-1]["input"] if each["type"] == "mcp_approval_response")
    assert refusal["approve"] is False
    assert not any(each["type"] == "mcp_call" for each in page.sent()[-1]["input"])


@pytest.fixture(scope="module")
def demo(quire_serve: Any) -> str:
    """The demo model, which sees, with its adapters."""
    return str(quire_serve().url())


def test_models_and_adapters_are_picked_per_chat(open_page: Any, demo: str) -> None:
    page = open_page(f"{demo}/", "quire-demo")
    adapters = [each.get_attribute("value") for each in page.all("#model optgroup option")]
    assert len(adapters) >= 2
    page.set("#model", adapters[0])
    page.set("#max_completion_tokens", "8")
    page.ask("Who are you?")
    assert page.sent()[-1]["model"] == adapters[0]
    assert adapters[0] in page.find(".message.assistant .figures").text
    page.find("#new").click()
    assert page.find("#model").get_attribute("value") == adapters[0]
    page.set("#model", "quire-demo")
    page.ask("Who are you?")
    assert page.sent()[-1]["model"] == "quire-demo"
    page.find("#conversations li:last-child .title").click()
    assert page.find("#model").get_attribute("value") == adapters[0]


def test_a_schema_holds_the_answer_which_is_shown_as_a_tree(open_page: Any, demo: str) -> None:
    page = open_page(f"{demo}/", "quire-demo")
    schema = {
        "type": "object",
        "properties": {"a": {"enum": ["x<b>"]}, "list": {"const": [[1, 2], {"deep": True}]}},
        "required": ["a", "list"],
        "additionalProperties": False,
    }
    page.set("#form-kind", "json_schema")
    page.set("#form-text", json.dumps(schema))
    page.ask("Anything")
    assert page.sent()[-1]["response_format"]["json_schema"]["schema"] == schema
    assert page.find(".message.assistant .json > details > summary").text == "{ 2 entries }"
    assert '"x<b>"' in page.texts(".json .leaf .string")
    folded = page.find(".json details:not([open]) > summary")
    folded.click()
    page.wait(lambda: "1" in page.texts(".json .leaf .number"))
    for kind, text, key, value in (
        ("regex", "ab{3}", "regex", "ab{3}"), ("choice", "yes\n\nno", "choice", ["yes", "no"]),
        ("grammar", 'start: "hm"', "grammar", 'start: "hm"'),
    ):  # fmt: skip
        page.set("#form-kind", kind)
        page.set("#form-text", text)
        page.ask("Again")
        assert page.sent()[-1]["structured_outputs"] == {key: value}
        assert page.texts(".message:last-child .text")[0] in ("abbb", "yes", "no", "hm")
    page.set("#form-kind", "json_schema")
    page.set("#form-text", "{")
    page.ask("Broken")
    assert page.find(".message:last-child .error").text.startswith("JSON schema: ")


def test_tokens_show_their_probabilities_and_alternatives(open_page: Any, demo: str) -> None:
    page = open_page(f"{demo}/", "quire-demo")
    page.set("#chances", "3")
    page.set("#max_completion_tokens", "12")
    page.ask("What is Quire?")
    assert (page.sent()[-1]["logprobs"], page.sent()[-1]["top_logprobs"]) == (True, 3)
    text = page.find(".message.assistant .text").text
    page.action(".message.assistant", "Token probabilities")
    shown = "".join(each.get_attribute("textContent") for each in page.all(".token")).replace("↵", "\n")
    assert shown.startswith(text)
    page.find(".token").send_keys(Keys.ARROW_RIGHT)
    assert page.driver.switch_to.active_element.text == page.all(".token")[1].text
    rows = page.texts(".chances-bubble .row")
    assert len(rows) == 3
    assert all("%" in row for row in rows)
    chances = [float(row.split()[-2]) for row in rows]
    assert chances == sorted(chances, reverse=True)
    page.action(".message.assistant", "Token probabilities")
    assert page.find(".message.assistant .text").text == text

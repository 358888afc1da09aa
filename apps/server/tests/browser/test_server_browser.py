"""The chat page: streams, stops, keeps a dialogue, escapes, asks for a key, takes files."""

from __future__ import annotations

import time
from typing import Any

import pytest
from selenium.webdriver.common.keys import Keys

from quire.assemble import FACTORY as REAL_FACTORY
from quire.config import QuireConfig
from quire_testkit.seeing_models import SeeingModel, data_url, drawing, png

ENGINE = {"max_model_len": 4096, "num_blocks": 1024, "step_time_s": 0.01, "check_kv": False}


def test_streams_an_answer_with_its_figures(page: Any) -> None:
    page.set("#max_completion_tokens", "60")
    page.send("hello there")
    assert page.texts(".message.user .body") == ["hello there"]
    page.wait(lambda: page.find(".message.assistant .body").text != "")
    assert page.find(".message.assistant").get_attribute("aria-busy") == "true"
    seen = len(page.find(".message.assistant .body").text)
    page.wait_done()
    assert len(page.find(".message.assistant .body").text) >= seen
    figures = page.find(".message.assistant .figures").text
    assert "first token " in figures
    assert " tokens/s" in figures
    assert "60 tokens" in figures
    assert page.find("#announcements").get_attribute("textContent").startswith("Answer: ")
    assert page.errors() == []


def test_stop_ends_the_answer_and_frees_the_engine(page: Any, served: Any) -> None:
    page.set("#max_completion_tokens", "3000")
    for stop in (lambda: page.find("#stop-answer").click(), lambda: page.keys(Keys.ESCAPE)):
        page.send("a long story")
        page.wait(lambda: page.find("#stop-answer").is_displayed())
        page.wait(lambda: page.find(".message.assistant:last-child .body").text != "")
        stop()
        page.wait_done()
        served.wait_idle(10)
        assert "stopped" in page.find(".message.assistant:last-child .figures").text
    page.set("#max_completion_tokens", "5")
    page.ask("and again")
    assert len(page.texts(".message.assistant")) == 3


def test_second_turn_sends_the_first_and_new_chat_forgets(page: Any) -> None:
    page.set("#max_completion_tokens", "8")
    page.set("#system", "Be brief.")
    for text in ("one", "two"):
        page.ask(text)
    history = page.messages()
    assert [entry["role"] for entry in history] == ["system", "user", "assistant", "user"]
    assert (history[0]["content"], history[1]["content"], history[3]["content"]) == ("Be brief.", "one", "two")
    page.find("#new").click()
    assert page.texts(".message") == []
    page.ask("three")
    assert page.messages() == [{"role": "user", "content": "three"}]


def test_text_is_never_markup(scripted_page: Any) -> None:
    page = scripted_page
    nasty = "<img src=x onerror=window.hacked=1><b>bold</b><script>window.hacked=2</script>"
    page.ask(f"¤{nasty}¥")
    assert page.texts(".message.user .body") == [f"¤{nasty}¥"]
    assert page.texts(".message.assistant .body") == [nasty]
    assert page.run("return window.hacked ?? null;") is None
    assert page.all(".message img, .message b, .message script") == []
    refused = "try { document.body.innerHTML = arguments[0]; return false; } catch (error) { return error.name; }"
    assert page.run(refused, nasty) == "TypeError", "the policy lets no script write markup"


def test_errors_of_the_server_are_shown_and_the_dialogue_goes_on(page: Any) -> None:
    page.set("#max_completion_tokens", "100000")
    page.ask("too much")
    assert "max_completion_tokens" in page.find(".message.failed .error").text
    page.set("#max_completion_tokens", "4")
    page.ask("fine")
    assert page.messages() == [{"role": "user", "content": "fine"}], "what got no answer is not told"
    page.action(".message.failed", "Regenerate")
    page.wait_done()
    assert page.texts(".message.failed") == []
    page.set("#logit_bias", "no JSON")
    page.ask("wrong")
    assert "Logit bias" in page.find(".message.failed .error").text


def test_example_starts_a_chat(page: Any) -> None:
    page.set("#max_completion_tokens", "4")
    page.find(".examples button").click()
    page.wait(lambda: page.texts(".message.user .body") != [])
    page.wait_done()


def test_page_asks_for_a_key(open_page: Any, make_live: Any) -> None:
    live = make_live(engine=ENGINE, api_key=("open-sesame",))
    page = open_page(f"{live.url}/?key=open-sesame")
    page.set("#max_completion_tokens", "4")
    page.ask("hello")
    assert page.texts(".message.failed") == []
    page.set("#key", "wrong")
    page.wait(lambda: "API key" in page.find("#connection").text)
    assert page.find("#key").is_displayed()
    page.set("#key", "open-sesame")
    page.wait_connected()
    page.run("sessionStorage.clear();")


def test_thoughts_are_folded_with_their_time_and_sent_back_as_reasoning(scripted_page: Any) -> None:
    page = scripted_page
    page.ask("¤<think>Hm, <b>two</b> and two.</think>Four.¥")
    assert page.texts(".message.assistant .text") == ["Four."]
    assert page.find(".thought summary").text.startswith("Thought for ")
    assert page.find(".thought").get_attribute("open") is None
    page.find(".thought summary").click()
    assert page.find(".thought .markdown").text == "Hm, <b>two</b> and two."
    page.ask("¤And?¥")
    said = {"role": "assistant", "content": "Four.", "reasoning": "Hm, <b>two</b> and two."}
    assert page.messages()[1] == said
    assert page.errors() == []


TRANSFER = """
const [kind, url, name, type] = arguments, transfer = new DataTransfer();
const bytes = Uint8Array.from(atob(url.split(",")[1]), (each) => each.charCodeAt(0));
transfer.items.add(new File([bytes], name, { type }));
const options = { bubbles: true, cancelable: true, [kind === "paste" ? "clipboardData" : "dataTransfer"]: transfer };
const event = kind === "paste" ? new ClipboardEvent("paste", options) : new DragEvent("drop", options);
document.querySelector("#prompt").dispatchEvent(event);
"""
"""Paste or drop a file: kind of event, data URL, name, media type."""


@pytest.fixture(scope="module")
def seeing(make_live: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = SeeingModel(tmp_path_factory.mktemp("seeing")).folder
    settings = {"dtype": "float32", "max_model_len": 256, "kv_cache_memory_bytes": 1 << 24}
    engine = QuireConfig.of(model=str(folder), **settings).to_dict()
    return make_live(folder=folder, factory=REAL_FACTORY, engine=engine, config=settings)


def test_images_are_chosen_pasted_dropped_and_sent_with_the_question(
    open_page: Any, seeing: Any, tmp_path: Any
) -> None:
    page = open_page(f"{seeing.url}/")
    assert "Drop or paste an image" in page.find(".welcome").text
    (tmp_path / "chosen.png").write_bytes(png(drawing(1)))
    page.find("#chooser").send_keys(str(tmp_path / "chosen.png"))
    page.wait(lambda: len(page.all("#files figure")) == 1)
    for count, (kind, number) in enumerate((("paste", 2), ("drop", 3), ("drop", 4)), 2):
        page.run(TRANSFER, kind, data_url(drawing(number)), f"{kind} {number}.png", "image/png")
        page.wait(lambda count=count: len(page.all("#files figure")) == count)
    page.find("[aria-label='Remove paste 2.png']").send_keys(Keys.ENTER)
    names = (
        "return Array.from(document.querySelectorAll(arguments[0]), (image) => image.alt + ' ' + image.naturalWidth);"
    )
    shown = ["chosen.png 40", "drop 3.png 40", "drop 4.png 40"]
    assert page.run(names, "#files img") == shown
    page.set("#max_completion_tokens", "4")
    page.ask("What is it?")
    assert page.texts(".message.failed") == []
    assert page.run(names, ".message.user img") == shown
    assert page.all("#files figure") == []
    asked = page.messages()[0]["content"]
    assert asked[:3] == [{"type": "image_url", "image_url": {"url": data_url(drawing(n))}} for n in (1, 3, 4)]
    assert asked[3:] == [{"type": "text", "text": "What is it?"}]
    page.ask("And now?")
    assert page.messages()[2] == {"role": "user", "content": "And now?"}
    assert page.errors() == []


def test_what_is_no_image_is_refused_by_page_and_server(open_page: Any, seeing: Any) -> None:
    page = open_page(f"{seeing.url}/")
    page.run(TRANSFER, "drop", "data:,AAEC", "notes.bin", "application/octet-stream")
    page.wait(lambda: page.find("#note").text == "notes.bin is neither a text nor a picture, sound or video")
    page.run(TRANSFER, "drop", "data:,JVBERi0=", "paper.PDF", "application/octet-stream")
    words = "paper.PDF is a PDF, which neither this page nor tiny reads: send pictures of its pages, or its text"
    page.wait(lambda: page.find("#note").text == words)
    page.run(TRANSFER, "drop", "data:,aGk=", "broken.png", "image/png")
    page.wait(lambda: len(page.all("#files figure")) == 1)
    page.ask("What is it?")
    assert "messages[0].content[0]" in page.find(".message.failed .error").text
    assert page.find("#note").text == ""
    assert all("400" in error for error in page.errors()), "the refusal alone"


def test_texts_are_sent_as_files_and_a_model_without_images_refuses_them(page: Any) -> None:
    page.run(TRANSFER, "paste", data_url(drawing(1)), "a.png", "image/png")
    page.wait(lambda: page.find("#note").text == "tiny takes no images: a.png cannot be sent")
    assert page.all("#files figure") == []
    page.run(TRANSFER, "drop", "data:,YGBgCmhpCmBgYA==", "notes.md", "text/markdown")
    page.wait(lambda: page.texts("#files .file.text span") == ["notes.md"])
    page.set("#max_completion_tokens", "4")
    page.ask("Read it")
    text = "File: notes.md\n````\n```\nhi\n```\n````"
    assert page.messages()[0]["content"] == [{"type": "text", "text": text}, {"type": "text", "text": "Read it"}]
    assert page.texts(".message.user .file.text span") == ["notes.md"]


HEARING = """
const real = window.fetch;
window.fetch = async (path, options) => {
  const response = await real(path, options);
  if (path !== "v1/models") return response;
  const list = await response.json();
  list.data[0].input_modalities.push("audio");
  return new Response(JSON.stringify(list));
};
"""


def test_sounds_are_recorded_where_the_model_hears(page: Any) -> None:
    assert not page.find("#record").is_displayed()
    # The page learns from /v1/models that the model hears.
    page.run(HEARING)
    page.set("#key", "")
    page.wait(lambda: page.find("#record").is_displayed())
    page.find("#record").click()
    page.wait(lambda: page.all("#record.recording"))
    time.sleep(0.6)
    page.find("#record").click()
    page.wait(lambda: page.all("#files audio"))
    page.set("#max_completion_tokens", "4")
    page.send("What do you hear?")
    page.wait(lambda: page.sent() != [])
    part = page.messages()[0]["content"][0]
    assert part["type"] == "audio_url"
    assert part["audio_url"]["url"].startswith("data:audio/wav;base64,UklGR")
    assert len(part["audio_url"]["url"]) > 8000, "half a second of 16,000 samples"
    page.wait_done()

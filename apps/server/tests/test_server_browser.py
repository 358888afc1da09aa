"""The chat page in headless Chromium: streams, stops, keeps a dialogue, escapes, asks for a key, sends images.

Skipped only where no browser is installed and QUIRE_REQUIRE_BROWSER is not set.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.support.ui import WebDriverWait

from quire.assemble import FACTORY as REAL_FACTORY
from quire.config import QuireConfig
from quire_testkit.seeing_models import SeeingModel, data_url, drawing, png

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
DRIVER = shutil.which("chromedriver")
pytestmark = pytest.mark.skipif(
    not (BROWSER and DRIVER) and not os.environ.get("QUIRE_REQUIRE_BROWSER"),
    reason="NO BROWSER: install chromium and chromedriver to test the chat page (QUIRE_REQUIRE_BROWSER=1 insists)",
)

ENGINE = {"max_model_len": 4096, "num_blocks": 1024, "step_time_s": 0.01, "check_kv": False}


@pytest.fixture(scope="module")
def served(make_live):
    return make_live(engine=ENGINE)


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Iterator[webdriver.Chrome]:
    options = webdriver.ChromeOptions()
    assert BROWSER, "QUIRE_REQUIRE_BROWSER is set, but there is no chromium"
    assert DRIVER, "QUIRE_REQUIRE_BROWSER is set, but there is no chromedriver"
    options.binary_location = BROWSER
    for flag in (
        "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
        "--disable-dev-shm-usage", "--disable-background-networking", "--disable-component-update", "--disable-sync",
        "--window-size=900,700",
        f"--user-data-dir={tmp_path_factory.mktemp('browser')}",
    ):  # fmt: skip
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    browser = webdriver.Chrome(options=options, service=webdriver.ChromeService(executable_path=DRIVER))
    yield browser
    browser.quit()


class Page:
    """What a person sees and does."""

    def __init__(self, driver: webdriver.Chrome, url: str) -> None:
        self.driver = driver
        self.errors()  # of the page before
        driver.get(url)

    def find(self, selector: str):
        return self.driver.find_element(By.CSS_SELECTOR, selector)

    def texts(self, selector: str) -> list[str]:
        return [each.text for each in self.driver.find_elements(By.CSS_SELECTOR, selector)]

    def wait(self, condition, seconds: float = 30):
        return WebDriverWait(self.driver, seconds, poll_frequency=0.05).until(lambda _: condition())

    def set(self, selector: str, value: str) -> None:
        self.driver.execute_script(
            "arguments[0].value = arguments[1]; arguments[0].dispatchEvent(new Event('change'));",
            self.find(selector),
            value,
        )

    def wait_connected(self) -> None:
        self.wait(lambda: self.find("#model").text == "tiny")

    def send(self, text: str) -> None:
        self.find("#prompt").send_keys(text, Keys.ENTER)

    def wait_done(self) -> None:
        self.wait(lambda: self.find("#send").is_displayed())

    def errors(self) -> list[str]:
        return [entry["message"] for entry in self.driver.get_log("browser") if entry["level"] == "SEVERE"]


@pytest.fixture
def page(driver, served) -> Page:
    page = Page(driver, f"{served.url}/")
    page.wait_connected()
    page.errors()
    return page


def test_streams_an_answer_with_its_figures(page):
    page.set("#max_tokens", "60")
    page.send("hello there")
    assert page.texts(".message.user .text") == ["hello there"]
    page.wait(lambda: page.find(".message.assistant .text").text != "")
    seen = len(page.find(".message.assistant .text").text)
    page.wait_done()
    assert len(page.find(".message.assistant .text").text) >= seen
    figures = page.find(".message.assistant .figures").text
    assert "first token " in figures
    assert " tokens/s" in figures
    assert page.errors() == []


def test_stop_button_ends_the_answer_and_frees_the_engine(page, served):
    page.set("#max_tokens", "3000")
    page.send("a long story")
    page.wait(lambda: page.find("#stop").is_displayed())
    page.wait(lambda: page.find(".message.assistant .text").text != "")
    page.find("#stop").click()
    page.wait_done()
    served.wait_idle(10)
    assert "stopped" in page.find(".message.assistant .figures").text
    page.set("#max_tokens", "5")
    page.send("and again")
    page.wait_done()
    assert len(page.texts(".message.assistant")) == 2


def test_second_turn_sends_the_first_and_new_chat_forgets(page):
    page.set("#max_tokens", "8")
    page.set("#system", "Be brief.")
    for text in ("one", "two"):
        page.send(text)
        page.wait_done()
    # The history is a variable of the page's script.
    history = page.driver.execute_script("return messages.map((message) => message.role + ':' + message.content)")
    assert [entry.split(":")[0] for entry in history] == ["user", "assistant", "user", "assistant"]
    assert history[0] == "user:one"
    page.find("#new").click()
    assert page.driver.execute_script("return messages.length") == 0
    assert page.texts(".message") == []


def test_text_is_never_markup(page):
    page.set("#max_tokens", "3")
    nasty = "<img src=x onerror=window.hacked=1><b>bold</b>"
    page.send(nasty)
    page.wait_done()
    assert page.texts(".message.user .text") == [nasty]
    assert page.driver.execute_script("return window.hacked") is None
    assert page.driver.find_elements(By.CSS_SELECTOR, ".message img, .message b") == []


def test_errors_of_the_server_are_shown_and_the_dialogue_goes_on(page):
    page.set("#max_tokens", "100000")
    page.send("too much")
    page.wait_done()
    page.wait(lambda: "max_completion_tokens" in page.find(".message.error .text").text)
    page.set("#max_tokens", "4")
    page.send("fine")
    page.wait_done()
    assert page.texts(".message.error") == []
    assert page.driver.execute_script("return messages.length") == 2


def test_example_starts_a_chat(page):
    page.set("#max_tokens", "4")
    page.find(".hint button").click()
    page.wait(lambda: page.texts(".message.user .text") != [])
    page.wait_done()


def test_page_asks_for_a_key(driver, make_live):
    live = make_live(engine=ENGINE, api_key=("open-sesame",))
    page = Page(driver, f"{live.url}/?key=open-sesame")
    page.wait_connected()
    page.set("#max_tokens", "4")
    page.send("hello")
    page.wait_done()
    assert page.texts(".message.error") == []
    page.set("#key", "wrong")
    page.wait(lambda: "API key" in page.find("#model").text)
    assert page.find("#key").is_displayed()
    page.set("#key", "open-sesame")
    page.wait_connected()
    driver.execute_script("sessionStorage.clear()")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_light_and_dark(page, scheme, tmp_path: Path):
    features = [{"name": "prefers-color-scheme", "value": scheme}]
    page.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
    page.set("#max_tokens", "40")
    page.send("hello")
    page.wait_done()
    background = page.driver.execute_script("return getComputedStyle(document.body).backgroundColor")
    red = int(background.removeprefix("rgb(").split(",")[0])
    assert (red > 200) == (scheme == "light")
    folder = Path(os.environ.get("QUIRE_SCREENSHOTS", tmp_path))
    time.sleep(0.1)
    assert page.driver.save_screenshot(str(folder / f"chat-{scheme}.png"))
    page.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})


def test_thoughts_are_shown_apart_and_sent_back_as_reasoning(driver, make_scripted):
    page = Page(driver, f"{make_scripted().url}/")
    page.wait_connected()
    page.set("#max_tokens", "200")
    page.find("#prompt").send_keys("¤<think>Hm, <b>two</b> and two.</think>Four.¥", Keys.ENTER)
    page.wait(lambda: page.texts(".message.assistant .text") == ["Four."])
    page.wait_done()
    assert page.find(".message.assistant .thoughts div").text == "Hm, <b>two</b> and two."
    said = driver.execute_script("return messages.at(-1)")
    assert said == {"role": "assistant", "content": "Four.", "reasoning": "Hm, <b>two</b> and two."}
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
def seeing(make_live, tmp_path_factory: pytest.TempPathFactory):
    folder = SeeingModel(tmp_path_factory.mktemp("seeing")).folder
    settings = {"dtype": "float32", "max_model_len": 256, "kv_cache_memory_bytes": 1 << 24}
    engine = QuireConfig.of(model=str(folder), **settings).to_dict()
    return make_live(folder=folder, factory=REAL_FACTORY, engine=engine, config=settings)


def test_images_are_chosen_pasted_dropped_and_sent_with_the_question(driver, seeing, tmp_path: Path):
    page = Page(driver, f"{seeing.url}/")
    page.wait_connected()
    assert page.find("#attach").is_displayed()
    assert "Drop or paste an image" in page.find(".hint").text
    (tmp_path / "chosen.png").write_bytes(png(drawing(1)))
    page.find("#files").send_keys(str(tmp_path / "chosen.png"))
    page.wait(lambda: len(page.texts("#images figure")) == 1)
    for count, (kind, number) in enumerate((("paste", 2), ("drop", 3), ("drop", 4)), 2):
        driver.execute_script(TRANSFER, kind, data_url(drawing(number)), f"{kind} {number}.png", "image/png")
        page.wait(lambda count=count: len(page.texts("#images figure")) == count)
    page.find("[aria-label='Remove paste 2.png']").send_keys(Keys.ENTER)
    names = (
        "return Array.from(document.querySelectorAll(arguments[0]), (image) => image.alt + ' ' + image.naturalWidth)"
    )
    shown = ["chosen.png 40", "drop 3.png 40", "drop 4.png 40"]
    assert driver.execute_script(names, "#images img") == shown
    page.set("#max_tokens", "4")
    page.send("What is it?")
    page.wait_done()
    assert page.texts(".message.error .text") == []
    assert driver.execute_script(names, ".message.user img") == shown
    assert page.texts("#images figure") == []
    asked = driver.execute_script("return messages[0].content")
    assert asked[:3] == [{"type": "image_url", "image_url": {"url": data_url(drawing(n))}} for n in (1, 3, 4)]
    assert asked[3:] == [{"type": "text", "text": "What is it?"}]
    assert driver.execute_script("return messages[1].role") == "assistant", "images were read, and answered"
    page.send("And now?")
    page.wait_done()
    assert driver.execute_script("return messages[2]") == {"role": "user", "content": "And now?"}
    assert page.errors() == []


def test_what_is_no_image_is_refused_by_page_and_server(driver, seeing):
    page = Page(driver, f"{seeing.url}/")
    page.wait_connected()
    driver.execute_script(TRANSFER, "drop", "data:,aGk=", "notes.txt", "text/plain")
    page.wait(lambda: page.find("#note").text == "notes.txt is no image")
    driver.execute_script(TRANSFER, "drop", "data:,aGk=", "broken.png", "image/png")
    page.wait(lambda: len(page.texts("#images figure")) == 1)
    page.send("What is it?")
    page.wait_done()
    page.wait(lambda: "messages[0].content[0]" in page.find(".message.error .text").text)
    assert page.find("#note").text == ""
    assert driver.execute_script("return messages.length") == 0
    assert all("400" in error for error in page.errors()), "the refusal alone"


def test_a_model_without_images_is_said_not_to_take_them(page):
    assert not page.find("#attach").is_displayed()
    page.driver.execute_script(TRANSFER, "paste", data_url(drawing(1)), "a.png", "image/png")
    page.wait(lambda: page.find("#note").text == "tiny reads text only: images cannot be sent")
    assert page.texts("#images figure") == []

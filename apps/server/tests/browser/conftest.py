"""The chat page in headless Chromium. Skipped only where there is no browser and QUIRE_REQUIRE_BROWSER is not set."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
from selenium import webdriver
from selenium.common.exceptions import StaleElementReferenceException
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.remote.webelement import WebElement
from selenium.webdriver.support.ui import WebDriverWait

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
DRIVER = shutil.which("chromedriver")
ENGINE = {"max_model_len": 4096, "num_blocks": 1024, "step_time_s": 0.01, "check_kv": False}
WIDTH, HEIGHT = 1200, 800
SOUND = Path(__file__).resolve().parents[4] / "packages" / "llm" / "tests" / "sounds" / "river.ogg"
RECORDER = """
window.sent = [];
const real = window.fetch;
window.fetch = (path, options) => {
  if (typeof options?.body === "string") window.sent.push({ path: String(path), body: JSON.parse(options.body) });
  return real(path, options);
};
"""
"""Notes the bodies of the page's requests, and sends them as they are."""


@pytest.fixture(scope="session")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Iterator[webdriver.Chrome]:
    """One browser for all tests; each page begins with nothing kept."""
    if not (BROWSER and DRIVER) and not os.environ.get("QUIRE_REQUIRE_BROWSER"):
        pytest.skip(
            "NO BROWSER: install chromium and chromedriver to test the chat page (QUIRE_REQUIRE_BROWSER=1 insists)"
        )
    options = webdriver.ChromeOptions()
    assert BROWSER, "QUIRE_REQUIRE_BROWSER is set, but there is no chromium"
    assert DRIVER, "QUIRE_REQUIRE_BROWSER is set, but there is no chromedriver"
    options.binary_location = BROWSER
    for flag in (
        "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
        "--disable-dev-shm-usage", "--disable-background-networking", "--disable-component-update", "--disable-sync",
        "--use-fake-device-for-media-stream", "--use-fake-ui-for-media-stream",
        f"--use-file-for-fake-audio-capture={spoken_file(tmp_path_factory.mktemp('sounds'))}",
        f"--window-size={WIDTH},{HEIGHT}",
        f"--user-data-dir={tmp_path_factory.mktemp('browser')}",
    ):  # fmt: skip
        options.add_argument(flag)
    downloads = tmp_path_factory.mktemp("downloads")
    options.add_experimental_option("prefs", {"download.default_directory": str(downloads)})
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    browser = webdriver.Chrome(options=options, service=webdriver.ChromeService(executable_path=DRIVER))
    browser.execute_cdp_cmd("Page.addScriptToEvaluateOnNewDocument", {"source": RECORDER})
    yield browser
    browser.quit()


def spoken_file(folder: Path) -> Path:
    """What the microphone hears, again and again: the first sentence of the Whisper tests, and a second of silence."""
    samples, rate = soundfile.read(SOUND, dtype="float32")
    sentence = samples[: round(4.7 * rate)]
    soundfile.write(folder / "spoken.wav", np.concatenate([sentence, np.zeros(rate, np.float32)]), rate)
    return folder / "spoken.wav"


class Page:
    """What a person sees and does."""

    def __init__(self, driver: webdriver.Chrome, url: str) -> None:
        self.driver = driver
        self.url = url
        self.errors()  # of the page before
        driver.get(url)

    def find(self, selector: str) -> WebElement:
        return self.driver.find_element(By.CSS_SELECTOR, selector)

    def all(self, selector: str) -> list[WebElement]:
        return self.driver.find_elements(By.CSS_SELECTOR, selector)

    def texts(self, selector: str) -> list[str]:
        """What is shown of each element; read again where the page replaced one in between."""
        (texts,) = self.wait(lambda: ([each.text for each in self.all(selector)],))
        return texts

    def run(self, script: str, *arguments: Any) -> Any:
        """What a script returns, also through a promise."""
        return self.driver.execute_script(f"return (async () => {{ {script} }})();", *arguments)

    def wait(self, condition: Callable[[], Any], seconds: float = 30) -> Any:
        """What a condition gives once it holds; one that reads an element which the page replaces is asked again."""
        replaced = [StaleElementReferenceException]
        waiting = WebDriverWait(self.driver, seconds, poll_frequency=0.05, ignored_exceptions=replaced)
        return waiting.until(lambda _: condition())

    def wait_connected(self, model: str = "tiny") -> None:
        self.wait(lambda: self.all("body[data-connected]") and self.find("#model").get_attribute("value") == model)

    def send(self, text: str) -> None:
        """Type a text, whatever its characters, and press Enter."""
        self.run("const box = document.querySelector('#prompt'); box.value = arguments[0];", text)
        self.find("#prompt").send_keys(Keys.ENTER)

    def wait_done(self) -> None:
        self.wait(lambda: self.find("#send").is_displayed() and not self.all("[aria-busy=true]"))

    def ask(self, text: str) -> None:
        """Send, and wait for the answer."""
        self.send(text)
        self.wait_done()

    def keys(self, *keys: str) -> None:
        """Press keys together."""
        actions = webdriver.ActionChains(self.driver)
        for key in keys:
            actions = actions.key_down(key)
        for key in reversed(keys):
            actions = actions.key_up(key)
        actions.perform()

    def set(self, selector: str, value: str) -> None:
        """Fill a field of the settings, which are opened for it."""
        if not self.find("#settings").is_displayed():
            self.find("#show-settings").click()
        self.run(
            "const [field, value] = arguments; field.closest('details')?.setAttribute('open', ''); field.value = value;"
            "field.dispatchEvent(new Event('input', { bubbles: true }));"
            "field.dispatchEvent(new Event('change', { bubbles: true }));",
            self.find(selector),
            value,
        )

    def action(self, message: str, label: str) -> None:
        """Press a button of a message."""
        button = self.find(f"{message} .actions [aria-label='{label}']")
        self.run("arguments[0].click();", button)

    def sent(self) -> list[dict[str, Any]]:
        """Bodies of the requests so far."""
        return [each["body"] for each in self.run("return window.sent;")]

    def messages(self) -> list[dict[str, Any]]:
        """What the last request told the model."""
        return list(self.sent()[-1]["messages"])

    def kept(self) -> list[dict[str, Any]]:
        """Conversations that the browser keeps."""
        return list(
            self.run(
                "const { ConversationStore } = await import(new URL('page/conversations.js', location.href).href);"
                "return (await ConversationStore.open()).all();"
            )
        )

    def errors(self) -> list[str]:
        return [entry["message"] for entry in self.driver.get_log("browser") if entry["level"] == "SEVERE"]


@pytest.fixture(scope="session")
def open_page(driver: webdriver.Chrome) -> Callable[[str], Page]:
    """Opens the page of a server, in a browser that keeps nothing yet."""

    def open_page(url: str, model: str = "tiny") -> Page:
        origin = "/".join(url.split("/")[:3])
        driver.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})
        driver.execute_cdp_cmd("Storage.clearDataForOrigin", {"origin": origin, "storageTypes": "all"})
        driver.get("about:blank")
        page = Page(driver, url)
        page.wait_connected(model)
        page.run("sessionStorage.clear();")
        page.errors()
        return page

    return open_page


@pytest.fixture(scope="session")
def served(make_session_live: Any) -> Any:
    """A server whose answers are any tokens, 100 a second."""
    return make_session_live(engine=ENGINE)


@pytest.fixture
def page(open_page: Callable[[str], Page], served: Any) -> Page:
    return open_page(f"{served.url}/")


@pytest.fixture
def scripted_page(open_page: Callable[[str], Page], scripted: Any) -> Page:
    """A page whose model says what stands between ¤ and ¥."""
    return open_page(f"{scripted.url}/")


@pytest.fixture
def screenshots(tmp_path: Path) -> Path:
    return Path(os.environ.get("QUIRE_SCREENSHOTS", tmp_path))

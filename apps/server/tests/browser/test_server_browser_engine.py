"""The engine, live, on the page's second tab: what it shows, by mouse and keyboard, in every look."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from selenium.webdriver.common.keys import Keys

ENGINE = {
    "max_model_len": 4096, "num_blocks": 600, "step_time_s": 0.02, "check_kv": False, "max_num_seqs": 4,
    "max_num_batched_tokens": 256,
}  # fmt: skip


@pytest.fixture(scope="module")
def busy(make_live: Any) -> Any:
    """A server with few rows."""
    return make_live(engine=ENGINE)


@pytest.fixture
def engine_page(open_page: Callable[[str], Any], busy: Any) -> Any:
    page = open_page(f"{busy.url}/")
    page.run("history.replaceState(null, '', location.pathname);")
    return page


class Load:
    """Requests that run meanwhile."""

    def __init__(self, server: Any, count: int, max_tokens: int, first: int = 0) -> None:
        self._threads = [
            threading.Thread(target=self._ask, args=(server, f"ask-{index}", max_tokens))
            for index in range(first, first + count)
        ]
        for thread in self._threads:
            thread.start()

    def _ask(self, server: Any, name: str, max_tokens: int) -> None:
        prompt = list(range(100, 300)) + [int(name.removeprefix("ask-")) + 5] * 300
        body = {"prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True}
        server.post("/v1/completions", body, headers={"x-request-id": name})

    def end(self) -> None:
        for thread in self._threads:
            thread.join()


def open_engine(page: Any) -> None:
    page.keys(Keys.ALT, "v")
    page.wait(lambda: page.all("#engine-view[data-live=true]"))


def pixels(page: Any, selector: str) -> int:
    """Number of colours that a canvas shows."""
    return int(
        page.run(
            "const canvas = document.querySelector(arguments[0]);"
            "const { data } = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height);"
            "return new Set(new Uint32Array(data.buffer)).size;",
            selector,
        )
    )


def test_rows_blocks_steps_and_an_explanation(engine_page: Any, busy: Any) -> None:
    page = engine_page
    open_engine(page)
    assert not page.find("#chat-view").is_displayed()
    empty = pixels(page, ".map canvas")
    load = Load(busy, 6, 60)
    page.wait(lambda: len(page.texts(".requests tr[data-phase=decode]")) == 4 and page.all("[data-phase=waiting]"))
    assert "for a row" in page.find("[data-phase=waiting]").text
    assert pixels(page, ".map canvas") > empty
    assert pixels(page, ".steps canvas") > 2
    label = page.find(".map canvas").get_attribute("aria-label")
    assert label.startswith("KV cache, 600 blocks of 16 tokens:")
    figures = dict(zip(page.texts(".figures dt"), page.texts(".figures dd"), strict=True))
    assert figures["running · waiting"].startswith("4 · ")
    assert figures["output"].endswith("/s")
    assert float(figures["output"].removesuffix("/s")) > 10
    page.wait(lambda: len(page.texts(".requests tr[data-phase=over]")) == 6)
    load.end()
    page.wait(lambda: "ms" in page.find(".figures").text)
    button = next(each for each in page.all(".requests button") if each.text == "ask-5")
    button.click()
    page.wait(lambda: page.all(".story .sentences li"))
    story = page.find(".story").text
    assert "ask-5" in story
    assert "waited" in story
    assert "was read in" in story
    assert "of cached and" not in story
    assert page.find(".story .track").get_attribute("aria-label").startswith("waiting ")
    page.find(".story summary").click()
    marks = page.texts(".story .marks li")
    assert marks[0].endswith("queued")
    assert marks[-1].endswith("finished (length)")
    assert any("of the prompt" in mark for mark in marks)
    assert page.errors() == []


def test_the_engine_is_watched_while_the_tab_is_seen(engine_page: Any, busy: Any) -> None:
    page = engine_page
    open_engine(page)
    assert page.run("return location.hash;") == "#engine"
    page.find("#tab-chat").click()
    assert page.find("#prompt").is_displayed()
    busy.wait_idle()  # no stream is open
    assert page.errors() == []


def test_by_keyboard(engine_page: Any, busy: Any) -> None:
    page = engine_page
    load = Load(busy, 2, 30, first=10)
    page.find("#tab-chat").send_keys(Keys.ARROW_RIGHT)
    assert page.driver.switch_to.active_element.get_attribute("id") == "tab-engine"
    page.wait(lambda: len(page.texts(".requests tr")) > 2)
    load.end()
    chart = page.find(".steps canvas")
    chart.send_keys(Keys.ARROW_LEFT)
    page.wait(lambda: page.find("#announcements").text.startswith("step "))
    told = page.find("#announcements").text
    chart.send_keys(Keys.ARROW_LEFT)
    assert page.find("#announcements").text != told
    button = page.all(".requests button")[0]
    button.send_keys(Keys.ENTER)
    page.wait(lambda: page.all(".story .sentences li"))
    assert page.find(".requests button[aria-pressed=true]").text.startswith("ask-1")
    page.find(".story [aria-label='Close the explanation']").send_keys(Keys.ENTER)
    assert not page.find(".story").is_displayed()
    page.keys(Keys.ALT, "v")
    assert page.find("#chat-view").is_displayed()


LOOKS = {"light": (1200, 1000, "light"), "dark": (1200, 1000, "dark"), "phone": (390, 844, "light")}


@pytest.mark.parametrize("look", LOOKS)
def test_looks(engine_page: Any, busy: Any, screenshots: Path, look: str) -> None:
    page = engine_page
    width, height, theme = LOOKS[look]
    size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": look == "phone"}
    page.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    page.run("document.documentElement.dataset.theme = arguments[0];", theme)
    page.find("#tab-engine").click()
    load = Load(busy, 6, 120)
    page.wait(lambda: len(page.texts(".requests tr[data-phase=decode]")) == 4)
    next(each for each in page.all(".requests button") if each.text.startswith("ask-")).click()
    page.wait(lambda: page.all(".story .sentences li"))
    page.driver.save_screenshot(str(screenshots / f"engine-{look}.png"))
    overflow = page.run("return document.documentElement.scrollWidth - document.documentElement.clientWidth;")
    assert overflow <= 0
    view = page.find("#engine-view")
    assert page.run("return arguments[0].scrollWidth - arguments[0].clientWidth;", view) <= 0
    page.run("arguments[0].scrollTo(0, 1e6);", view)
    page.driver.save_screenshot(str(screenshots / f"engine-{look}-end.png"))
    load.end()
    assert json.dumps(page.errors()) == "[]"

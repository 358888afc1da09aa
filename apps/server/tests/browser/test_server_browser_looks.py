"""The page for everybody: keyboard, screen readers, contrast, dark and light, phones, less motion."""

from __future__ import annotations

import re
import time
from typing import Any

import pytest
from selenium.webdriver.common.keys import Keys

RICH = """¤# Title

Text with `code`, **bold** and https://x.example/a/very/long/address/that/has/no/break/at/all/anywhere/in/it/and/so/on.

| a column | another column | a third column | a fourth column | a fifth column | a sixth column |
|---|---|---|---|---|---|
| 1 | 2 | 3 | 4 | 5 | 6 |

```python
a_long_line_of_code = [number for number in range(1000) if number % 2 == 0 and number % 3 == 0]
```

$$\\frac{a}{b} + \\sum_{i=1}^n i + a + b + c + d + e + f + g + h + i + j + k + l + m + n + o + p + q + r + s + t$$

averylongwordaverylongwordaverylongwordaverylongwordaverylongwordaverylongwordaverylongword¥"""


def test_the_keyboard_does_everything(scripted_page: Any) -> None:
    page = scripted_page
    assert page.driver.switch_to.active_element.get_attribute("id") == "prompt"
    page.find("#prompt").send_keys("a", Keys.SHIFT, Keys.ENTER, Keys.NULL, "b")
    assert page.find("#prompt").get_attribute("value") == "a\nb"
    page.find("#prompt").clear()
    for text in ("one", "two"):
        page.keys(Keys.ALT, "n")
        page.ask(f"¤{text}¥")
    page.keys(Keys.ALT, Keys.ARROW_DOWN)
    assert page.texts(".message.assistant .body") == ["one"]
    page.keys(Keys.ALT, Keys.ARROW_UP)
    assert page.texts(".message.assistant .body") == ["two"]
    page.keys(Keys.ALT, "r")
    page.wait_done()
    assert page.find(".message.assistant .branches").text == "2/2"
    page.keys(Keys.ALT, "g")
    page.wait_done()
    assert page.sent()[-1]["continue_final_message"] is True
    page.keys(Keys.ALT, "e")
    assert page.driver.switch_to.active_element.get_attribute("aria-label") == "Edit the message"
    page.driver.switch_to.active_element.send_keys(Keys.ESCAPE)
    page.keys(Keys.ALT, "k")
    assert page.driver.switch_to.active_element.get_attribute("id") == "search"
    page.driver.switch_to.active_element.send_keys("one", Keys.ARROW_DOWN, Keys.ENTER)
    assert page.texts(".message.assistant .body") == ["one"]
    page.keys(Keys.ALT, "b")
    assert not page.find("#sidebar").is_displayed()
    page.keys(Keys.ALT, "b")
    page.keys(Keys.ALT, "s")
    assert page.driver.switch_to.active_element.get_attribute("id") == "system"
    page.keys(Keys.ESCAPE)
    assert not page.find("#settings").is_displayed()
    assert page.driver.switch_to.active_element.get_attribute("id") == "show-settings"
    page.keys(Keys.ALT, "m")
    assert page.driver.switch_to.active_element.get_attribute("id") == "model"
    page.find("#log").click()
    page.keys("/")
    assert page.driver.switch_to.active_element.get_attribute("id") == "prompt"
    page.find("#help").click()
    shown = page.find("#keys").text
    assert all(word in shown for word in ("Regenerate the last answer", "Search chats", "Esc"))
    page.keys(Keys.ESCAPE)
    page.wait(lambda: page.all("#keys") == [])  # a dialog is closed by a task of its own
    assert page.errors() == []


NAMELESS = """
const shown = (each) => each.checkVisibility({ opacityProperty: false }) && !each.closest('[hidden]');
const name = (each) => each.ariaLabel || each.labels?.[0]?.textContent || each.getAttribute('title')
  || each.textContent.trim() || each.getAttribute('alt');
const controls = 'button, input:not([type=file]), select, textarea, a, summary, img, meter, [role=button], audio';
const nameless = [...document.querySelectorAll(controls)]
  .filter((each) => shown(each) && !name(each) && !each.ariaHidden);
const ids = [...document.querySelectorAll('[id]')].map((each) => each.id);
const twice = ids.filter((id, index) => ids.indexOf(id) !== index);
const references = [...document.querySelectorAll('[aria-controls], [aria-describedby]')]
  .flatMap((each) => (each.getAttribute('aria-controls') ?? each.getAttribute('aria-describedby')).split(' '));
const levels = [...document.querySelectorAll('h1, h2, h3, h4')].filter(shown).map((each) => each.tagName);
return [nameless.map((each) => each.outerHTML.slice(0, 200)), twice, references.filter((id) => !ids.includes(id)),
  levels[0], document.documentElement.lang, document.title];
"""
"""What a screen reader would stumble over: controls without a name, ids that are there twice or not at all."""


def test_everything_has_a_name_for_screen_readers(scripted_page: Any) -> None:
    page = scripted_page
    page.ask(RICH)
    page.find("#show-settings").click()
    page.run("for (const each of document.querySelectorAll('#settings details')) each.open = true;")
    assert page.run(NAMELESS) == [[], [], [], "H1", "en", "Quire"]
    roles = page.run("return ['#log', '#announcements', '#connection'].map((id) => document.querySelector(id).role);")
    assert roles == ["log", "status", "status"]
    assert len(page.all("main")) == 1
    assert page.find(".message.assistant").get_attribute("aria-label") == "Answer"
    assert page.find("#announcements").get_attribute("textContent").startswith("Answer: # Title")


CONTRAST = """
const probe = document.createElement('canvas').getContext('2d', { willReadFrequently: true });
const rgba = (color) => {
  probe.clearRect(0, 0, 1, 1); probe.fillStyle = color; probe.fillRect(0, 0, 1, 1);
  return [...probe.getImageData(0, 0, 1, 1).data];
};
const light = (color) => color.slice(0, 3).map((each) => each / 255)
  .map((each) => (each <= 0.04045 ? each / 12.92 : ((each + 0.055) / 1.055) ** 2.4))
  .reduce((sum, each, index) => sum + each * [0.2126, 0.7152, 0.0722][index], 0);
const ground = (each) => {
  for (let up = each; up; up = up.parentElement) {
    const color = rgba(getComputedStyle(up).backgroundColor);
    if (color[3] > 250) return color;
  }
  return [255, 255, 255, 255];
};
const poor = [];
for (const each of document.querySelectorAll('body *')) {
  const hasText = [...each.childNodes].some((child) => child.nodeType === 3 && child.data.trim());
  if (!hasText || !each.checkVisibility() || each.closest('.offscreen, .skip, :disabled, noscript, option')) continue;
  const [one, other] = [light(rgba(getComputedStyle(each).color)), light(ground(each))].sort((a, b) => b - a);
  const ratio = (one + 0.05) / (other + 0.05);
  if (ratio < 4.5) poor.push(`${each.tagName}.${each.className} ${each.textContent.slice(0, 30)}: ${ratio.toFixed(2)}`);
}
return [poor, document.querySelectorAll('body *').length];
"""
"""Texts whose contrast with what is behind them is below 4.5 (WCAG 2.2, 1.4.3, level AA)."""


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_light_and_dark_are_readable(scripted_page: Any, scheme: str, screenshots: Any) -> None:
    page = scripted_page
    features = [{"name": "prefers-color-scheme", "value": scheme}]
    page.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
    page.ask(f"¤<think>Hm.</think>{RICH.strip('¤¥')}¥")
    background = page.run("return getComputedStyle(document.body).backgroundColor;")
    assert (int(re.findall(r"\d+", background)[0]) > 200) == (scheme == "light")
    page.find("#show-settings").click()
    time.sleep(0.3)  # colours change gradually
    poor, num_elements = page.run(CONTRAST)
    assert poor == []
    assert num_elements > 150
    assert page.driver.save_screenshot(str(screenshots / f"chat-{scheme}.png"))
    other = {"light": "dark", "dark": "light"}[scheme]
    page.set("#theme", other)
    background = page.run("return getComputedStyle(document.body).backgroundColor;")
    assert (int(re.findall(r"\d+", background)[0]) > 200) == (other == "light"), "what is chosen wins"
    page.driver.refresh()
    page.wait_connected()
    assert page.run("return document.documentElement.dataset.theme;") == other
    page.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})


@pytest.mark.parametrize("width", [320, 390, 768])
def test_a_phone_has_everything_and_never_scrolls_sideways(scripted_page: Any, width: int, screenshots: Any) -> None:
    page = scripted_page
    metrics = {"width": width, "height": 720, "deviceScaleFactor": 1, "mobile": True}
    page.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    wide = (
        "return [document.documentElement, document.body, document.querySelector('#log')]"
        ".filter((each) => each.scrollWidth > each.clientWidth).map((each) => each.tagName + each.id);"
    )
    page.wait(lambda: not page.find("#sidebar").is_displayed())
    page.run("document.querySelector('#prompt').value = arguments[0];", RICH)
    page.find("#send").click()
    page.wait_done()
    assert page.run(wide) == []
    assert page.run("return document.querySelector('.message.assistant').getBoundingClientRect().right;") <= width
    assert page.driver.save_screenshot(str(screenshots / f"chat-{width}.png"))
    page.find("#show-settings").click()
    page.run("for (const each of document.querySelectorAll('#settings details')) each.open = true;")
    assert page.run(wide) == []
    assert page.run("return document.querySelector('#settings').scrollWidth;") <= width
    page.find("#close-settings").click()
    page.find("#show-sidebar").click()
    assert page.texts("#conversations .title") != []
    page.find("#new").click()
    assert not page.find("#sidebar").is_displayed()
    assert page.texts(".message") == []
    page.driver.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def test_less_motion_where_the_system_asks_for_it(page: Any) -> None:
    page.set("#max_completion_tokens", "300")
    page.driver.execute_cdp_cmd(
        "Emulation.setEmulatedMedia", {"features": [{"name": "prefers-reduced-motion", "value": "reduce"}]}
    )
    page.send("hello")
    running = (
        "return document.getAnimations().filter((each) => each.playState === 'running' && "
        "each.effect.getComputedTiming().duration > 1).length;"
    )
    assert page.run(running) == 0
    page.keys(Keys.ESCAPE)
    page.wait_done()
    page.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})

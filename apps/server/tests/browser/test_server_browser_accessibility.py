"""Rules of axe-core over the page, which it breaks nowhere."""

from __future__ import annotations

from importlib.resources import files
from typing import Any

import pytest

AXE = (files("axe_core_python") / "axe.min.js").read_text()
RICH = (
    "¤# A title\n\nText with `code`, a [link](https://example.org) and a table.\n\n"
    "| a | b |\n|---|---|\n| 1 | 2 |\n\n```py\nx = 1\n```\n¥"
)
RUN = """
const tags = ['wcag2a', 'wcag2aa', 'wcag21a', 'wcag21aa', 'wcag22aa', 'best-practice'];
const found = await axe.run(document, { runOnly: tags });
const tell = (rules) => rules.map((rule) => `${rule.id}: ${rule.nodes.map((node) => node.target).join('; ')}`);
return [tell(found.violations), found.passes.length];
"""


def violations(page: Any) -> list[str]:
    """Rules that the page breaks as it is shown, each with its elements."""
    page.driver.execute_script(AXE)
    found, num_passed = page.run(RUN)
    assert num_passed > 15
    return list(found)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_no_rule_is_broken(scripted_page: Any, scheme: str) -> None:
    page = scripted_page
    features = [
        {"name": "prefers-color-scheme", "value": scheme}, {"name": "prefers-reduced-motion", "value": "reduce"}
    ]  # fmt: skip
    page.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
    page.ask(RICH)
    assert violations(page) == []
    page.find("#show-settings").click()
    page.run("for (const each of document.querySelectorAll('#settings details')) each.open = true;")
    assert violations(page) == []
    page.find("#close-settings").click()
    page.keys("\ue00a", "v")  # Alt
    page.wait(lambda: page.all("#engine-view[data-live=true]"))
    assert violations(page) == []
    page.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": []})


def test_a_rule_that_is_broken_is_found(scripted_page: Any) -> None:
    scripted_page.run(
        "const button = document.querySelector('#send'); button.textContent = ''; button.removeAttribute('title');"
        "button.setAttribute('aria-label', '');"
    )
    assert any(each.startswith("button-name: #send") for each in violations(scripted_page))

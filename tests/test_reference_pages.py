"""The reference of settings and commands says what the declarations say."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from reference_pages import COMMAND, PAGES, ROOT, setting_entry

from quire.setting_fields import config_fields
from quire_interfaces import Settings, between, one_of, setting


@dataclass(frozen=True, slots=True, kw_only=True)
class Oven(Settings):
    temperature: float = setting(180.0, help="Heat | of *the* oven.", unit="degrees", check=between(50, 250))
    racks: tuple[int, ...] = setting((), help="Racks that are in it.")
    fan: bool | None = setting(None, help="Whether the fan runs.")
    mode: str | None = setting(None, help="How it heats.", check=one_of(None, "top", "bottom"))
    code: str | None = setting(None, help="Opens it.", secret=True, flag="--door-code")


@pytest.mark.parametrize("page", PAGES)
def test_page_is_fresh(page: str) -> None:
    assert (ROOT / "docs" / page).read_text() == PAGES[page](), f"run `{COMMAND}`"


def test_an_entry_says_everything() -> None:
    sections = {"oven": Oven}
    fields = config_fields(sections)
    assert setting_entry(fields["temperature"], sections) == [
        "### temperature",
        "",
        "Heat | of \\*the\\* oven.",
        "",
        "| | |",
        "|---|---|",
        "| flag | `--temperature DEGREES` |",
        "| value | number, degrees |",
        "| must | be a number from 50 to 250 |",
        "| default | `180 degrees` |",
        "| environment | `QUIRE_TEMPERATURE` |",
        "| in a file | `temperature:` |",
        "| read by | `oven.temperature` |",
        "",
    ]
    shown = {name: "\n".join(setting_entry(spec, sections)) for name, spec in fields.items()}
    assert "| value | list of whole numbers |\n| default | none |" in shown["racks"]
    assert "| flag | `--[no-]fan` |\n| value | on or off |" in shown["fan"]
    assert "| must | be one of None, top, bottom |" in shown["mode"]
    assert "### door_code" in shown["door_code"]
    assert "| value | text, never shown |" in shown["door_code"]

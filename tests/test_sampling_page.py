"""The table of numbers in docs/sampling.md says what `SamplingParams` declares."""

from __future__ import annotations

from pathlib import Path

from quire_interfaces import SamplingParams
from quire_interfaces.number_range import NumberField, number_fields

PAGE = Path(__file__).parents[1] / "docs" / "sampling.md"


def line_of(field: NumberField) -> str:
    """Name, default and range of a field, as a line of the table."""
    names = " ".join(f"`{name}`" for name in (field.name, *field.range.aliases))
    default = "none" if field.default is None else f"{field.default:g}"
    return f"| {names} | {default} | {field.range} |"


def test_every_number_is_in_the_table() -> None:
    page = PAGE.read_text()
    missing = [line for line in map(line_of, number_fields(SamplingParams)) if line not in page]
    assert not missing, "docs/sampling.md lacks:\n" + "\n".join(missing)

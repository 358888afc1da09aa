"""The settings of configuration classes, one by one, as users name them. Knows how a field is declared
(`quire_interfaces.setting`); how its values are read, `quire.setting_text` and `quire.config` know.
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Mapping
from typing import Any, NamedTuple

from quire_interfaces import OneOf, Settings

__all__ = ["DERIVED", "ConfigField", "Origin", "Sections", "config_fields"]

Sections = Mapping[str, type[Settings]]
"""Name of a section -> its configuration class."""

DERIVED = frozenset(
    {
        ("runner", "draft_depth"),
        ("runner", "draft_topk"),
        ("runner", "rotates_by_axes"),
        ("runner", "dtype"),
        ("runner", "max_model_len"),
        ("runner", "max_num_batched_tokens"),
        ("runner", "max_num_seqs"),
        ("runner", "num_speculative_tokens"),
        ("scheduler", "num_lookahead_tokens"),
        ("scheduler", "num_speculative_tokens"),
    }
)
"""(section, field) that `quire.assemble` computes from the model and the rest; no user sets them."""


class ConfigField(NamedTuple):
    """One setting as a user sees it."""

    name: str
    """As in YAML and as a keyword, e.g. "max_num_seqs"."""
    flag: str
    """As on the command line, e.g. "--max-num-seqs"."""
    owners: tuple[tuple[str, str], ...]
    """(section, field name) of every component that reads it."""
    type: Any
    default: Any
    help: str
    unit: str
    choices: tuple[Any, ...] = ()
    """The only values it takes; empty where others are."""
    secret: bool = False
    """Its value is never shown."""
    nonempty: bool = False
    """Whoever sets it must give a value."""

    @property
    def env(self) -> str:
        """Environment variable, e.g. "QUIRE_MAX_NUM_SEQS"."""
        return "QUIRE_" + self.name.upper()


class Origin(NamedTuple):
    """Where a value came from."""

    value: Any
    source: str


def config_fields(sections: Sections) -> dict[str, ConfigField]:
    """All settings of these sections by name, in the order of declaration."""
    fields: dict[str, ConfigField] = {}
    for section, owner in sections.items():
        hints = typing.get_type_hints(owner)
        for spec in dataclasses.fields(owner):
            if (section, spec.name) in DERIVED:
                continue
            flag = spec.metadata.get("flag") or "--" + spec.name.replace("_", "-")
            name = flag.removeprefix("--").replace("-", "_")
            here = (section, spec.name)
            if name in fields:
                fields[name] = fields[name]._replace(owners=(*fields[name].owners, here))
                continue
            help_text, unit = spec.metadata.get("help", ""), spec.metadata.get("unit", "")
            default = None if spec.default is dataclasses.MISSING else spec.default
            check = spec.metadata.get("check")
            choices = check.choices if isinstance(check, OneOf) else ()
            secret, nonempty = spec.metadata.get("secret", False), spec.metadata.get("nonempty", False)
            fields[name] = ConfigField(
                name, flag, (here,), hints[spec.name], default, help_text, unit, choices, secret, nonempty
            )
    return fields

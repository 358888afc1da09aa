"""A setting of this package: QUIRE_GREETING in the environment."""

from __future__ import annotations

from dataclasses import dataclass

from quire.config import build_sections
from quire.environment import ENVIRONMENT, environment_values
from quire.setting_fields import config_fields
from quire_interfaces import Settings, setting

__all__ = ["GreetingConfig"]


@dataclass(frozen=True, slots=True, kw_only=True)
class GreetingConfig(Settings):
    """How to greet."""

    greeting: str = setting("Hello", help="What is said before a name.", nonempty=True)

    @classmethod
    def from_environment(cls) -> GreetingConfig:
        """As the environment says, with defaults for the rest."""
        sections: dict[str, type[Settings]] = {"greeting": cls}
        built, _ = build_sections(sections, [(ENVIRONMENT, environment_values(config_fields(sections)))])
        config = built["greeting"]
        assert isinstance(config, cls)
        return config

"""Plug-ins: parts that other packages bring, found by the entry points of their metadata.

An entry point is of a group (`quire.models`), has a name (`DampedLlamaForCausalLM`) and says what to import. Quire's
own packages are always found. QUIRE_PLUGINS in the environment names the others that may be used, by package or by
entry point, with commas between; empty allows none, and without it all are used, as with VLLM_PLUGINS. It is a
variable, no setting, because commands and settings themselves may be plug-ins (docs/plugins.md).
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from quire_interfaces.errors import ConfigError
from quire_interfaces.settings import Check, OneOf

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

__all__ = [
    "ALLOWED_VARIABLE",
    "GROUPS",
    "OneOfOrPlugin",
    "Plugin",
    "installed_plugins",
    "named_plugin",
    "not_allowed_hint",
    "one_of_or_plugin",
    "plugins_of",
]

ALLOWED_VARIABLE = "QUIRE_PLUGINS"

GROUPS = {
    "quire.commands": "commands of `quire`",
    "quire.diarizers": "what tells speakers apart",
    "quire.io_processors": "IO processors",
    "quire.kv_connectors": "KV connectors",
    "quire.logits_processors": "logits processors",
    "quire.models": "networks",
    "quire.ops": "kernels",
    "quire.platforms": "platforms",
    "quire.reasoning_parsers": "forms of thinking",
    "quire.settings": "settings",
    "quire.tool_parsers": "forms of tool calls",
}
"""Group of entry points -> what its plug-ins are."""

OWN_PACKAGES = frozenset(
    {"quire-bench", "quire-kernels-cpu", "quire-kernels-cuda", "quire-kernels-rocm", "quire-server", "quire-testkit"}
)
"""Quire's own packages that have entry points."""


@dataclass(frozen=True, slots=True)
class Plugin:
    """One entry point of an installed package."""

    point: EntryPoint

    @property
    def name(self) -> str:
        return self.point.name

    @property
    def package(self) -> str:
        """Name of the package, normalized: in lower case, with hyphens. "?" for metadata without a name."""
        named = self.point.dist.name if self.point.dist is not None else None
        return re.sub(r"[-_.]+", "-", named or "?").lower()

    @property
    def version(self) -> str:
        return self.point.dist.version if self.point.dist is not None else "?"

    @property
    def is_allowed(self) -> bool:
        """QUIRE_PLUGINS lets it be used."""
        names = os.environ.get(ALLOWED_VARIABLE)
        if names is None or self.package in OWN_PACKAGES:
            return True
        return not {self.name, self.package}.isdisjoint(each.strip() for each in names.split(","))

    def load(self, kind: type | None = None, *, field: str | None = None) -> Any:
        """Import what the entry point names.

        Args:
            kind: Its type; None for something that can be called.
            field: The setting that asked for it, for errors.

        Raises:
            ConfigError: It cannot be imported, or is of another type.
        """
        try:
            loaded = self.point.load()
        except Exception as error:
            raise self.error(f"cannot be loaded: {type(error).__name__}: {error}", field=field) from error
        if not (callable(loaded) if kind is None else isinstance(loaded, kind)):
            raise self._wrong_type(loaded, kind, field)
        return loaded

    def _wrong_type(self, loaded: Any, kind: type | None, field: str | None) -> ConfigError:
        must = "something to call" if kind is None else "a class" if kind is type else f"of type {kind.__name__}"
        return self.error(f"must be {must}, and is of type {type(loaded).__name__}", field=field)

    def error(self, what: str, *, field: str | None = None) -> ConfigError:
        """An error that names the package and the group; `what` ends the sentence "the plug-in ..."."""
        return ConfigError(
            f"the plug-in {self.name!r} of the entry-point group {self.point.group} ({self.point.value}, package "
            f"{self.package} {self.version}) {what}; repair or uninstall that package, or leave it out of "
            f"{ALLOWED_VARIABLE}",
            field=field,
        )


def plugins_of(group: str) -> list[Plugin]:
    """All plug-ins of a group, those that are not allowed too, by name."""
    assert group in GROUPS
    from importlib.metadata import entry_points  # most commands ask for no plug-in, and start without it

    return sorted((Plugin(point) for point in entry_points(group=group)), key=lambda each: (each.name, each.package))


def installed_plugins(group: str) -> dict[str, Plugin]:
    """The plug-ins of a group that may be used: name -> plug-in. Nothing is imported yet.

    Raises:
        ConfigError: Two packages have one of the same name.
    """
    found: dict[str, Plugin] = {}
    for plugin in plugins_of(group):
        if plugin.is_allowed and found.setdefault(plugin.name, plugin) is not plugin:
            raise _two_of_one_name(found[plugin.name], plugin)
    return found


def named_plugin(group: str, name: str, *, field: str) -> Plugin:
    """The plug-in that a setting names. Nothing is imported yet.

    Args:
        field: The setting.

    Raises:
        ConfigError: None of this name may be used, or two packages have one.
    """
    installed = installed_plugins(group)
    if name not in installed:
        names = ", ".join(sorted(installed)) or "none"
        raise ConfigError(
            f"{field} {name!r} is not installed (entry points {group}); there are: {names}"
            f"{not_allowed_hint(group, name)}",
            field=field,
        )
    return installed[name]


def _two_of_one_name(one: Plugin, other: Plugin) -> ConfigError:
    return ConfigError(
        f"two packages have a plug-in {one.name!r} of the entry-point group {one.point.group}: {one.package} "
        f"{one.version} ({one.point.value}) and {other.package} {other.version} ({other.point.value}); uninstall one, "
        f"or name the other packages in {ALLOWED_VARIABLE}"
    )


def not_allowed_hint(group: str, name: str) -> str:
    """What an error adds that finds no plug-in of this name: that QUIRE_PLUGINS keeps it out; else nothing."""
    for plugin in plugins_of(group):
        if plugin.name == name and not plugin.is_allowed:
            return f"; {plugin.package} {plugin.version} has it, and {ALLOWED_VARIABLE} does not name that package"
    return ""


@dataclass(frozen=True, slots=True)
class OneOfOrPlugin(OneOf):
    """Check for membership in `choices`, or for the name of a plug-in of `group`."""

    group: str = ""

    def __call__(self, value: Any) -> str | None:
        if value in self.choices:
            return None
        plugins = installed_plugins(self.group)
        if value in plugins:
            return None
        named = ", ".join(map(str, (*self.choices, *plugins)))
        return f"be one of {named} (plug-ins: {self.group}){not_allowed_hint(self.group, str(value))}"


def one_of_or_plugin(group: str, choices: Iterable[Any]) -> Check:
    """Check for membership in `choices`, which help and completion show, or for the name of a plug-in."""
    return OneOfOrPlugin(tuple(choices), group)

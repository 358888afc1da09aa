"""Who calls: the API keys of a server, and what a request's key says about its sender.

The guard puts a `Caller` into each request (`request.state.caller`). Whatever belongs to somebody is kept under
`Caller.owner`; whatever is shared out fairly is shared out by `Caller.tenant`. Knows no route.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import logging
import os
import stat
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import NamedTuple

import yaml

from quire_interfaces import ConfigError
from quire_server.config import ServerConfig, complaint_about_key
from quire_server.response_store import store_path
from quire_server.sealing import kept_key

__all__ = ["KEYLESS", "APIKeys", "Caller", "KeyLimits", "read_api_keys"]

_logger = logging.getLogger("quire")


@dataclass(frozen=True, slots=True)
class KeyLimits:
    """What the requests of one key may use; 0 sets no bound."""

    requests_per_minute: int = 0
    tokens_per_minute: int = 0
    """Prompt tokens and generated ones."""
    tokens_per_day: int = 0
    """Of a day of UTC."""


_LIMITS = tuple(field.name for field in fields(KeyLimits))


@dataclass(frozen=True, slots=True)
class Caller:
    """The sender of a request, as far as its API key tells."""

    tenant: str
    """The key's name in the key file; for a key without a name one that is made of its hash. "" on a server without
    keys, where nobody is told from anybody."""
    owner: str
    """Keyed hash of the key, the same after a restart with the same response store; "" on a server without keys."""
    is_admin: bool = False
    """Whether the key is one for administrators."""
    limits: KeyLimits = KeyLimits()
    """Of the key."""


KEYLESS = Caller("", "")
"""Everybody, on a server without keys."""


class _NamedKey(NamedTuple):
    name: str | None
    key: str
    is_admin: bool
    limits: KeyLimits = KeyLimits()


class APIKeys:
    """The keys of a server.

    Args:
        keys: All of them, with what they say.
        secret: For the owners' hashes; None makes them of the keys alone, slowly, so that nobody guesses keys by them.
    """

    def __init__(self, keys: Iterable[_NamedKey], secret: bytes | None = None) -> None:
        self._callers: list[tuple[bytes, Caller]] = []
        for each in keys:
            owner = _owner(each.key.encode(), secret)
            tenant = f"key-{owner[:8]}" if each.name is None else each.name
            self._callers.append((each.key.encode(), Caller(tenant, owner, each.is_admin, each.limits)))
        self.num_keys = len(self._callers)
        """Number of different keys."""
        self.is_open = all(caller.is_admin for _, caller in self._callers)
        """Whether requests need no key: there is none, or there are those of administrators only."""

    @property
    def sealing_key(self) -> bytes:
        """Secret where the keys are: made of them, the same in all processes of the server and after a restart."""
        whole = hashlib.blake2b(person=b"quire-sealing")
        for key, _ in self._callers:
            whole.update(len(key).to_bytes(4, "little") + key)
        return whole.digest()

    @property
    def has_admins(self) -> bool:
        """Whether some are administrators'."""
        return any(caller.is_admin for _, caller in self._callers)

    @property
    def callers(self) -> list[Caller]:
        """All who have a key, in the order of the settings."""
        return [caller for _, caller in self._callers]

    @property
    def limits(self) -> dict[str, KeyLimits]:
        """Tenant -> the limits of its key, of those that have any."""
        return {each.tenant: each.limits for _, each in self._callers if each.limits != KeyLimits()}

    def set_limits(self, limits: Mapping[str, KeyLimits]) -> None:
        """Give keys other limits, by tenant."""
        self._callers = [
            (key, replace(caller, limits=limits.get(caller.tenant, caller.limits))) for key, caller in self._callers
        ]

    def caller_of(self, presented: bytes) -> Caller | None:
        """Who sends this key; None for an unknown or missing one, where one is needed."""
        # All keys are compared, whichever fits, so that the time tells nothing.
        matches = [caller for key, caller in self._callers if hmac.compare_digest(presented, key)]
        if matches:
            return matches[0]
        return KEYLESS if self.is_open else None

    def caller_of_owner(self, owner: str) -> Caller | None:
        """Whose things these are (`Caller.owner`); None where the key is none of the server's any more."""
        found = next((caller for _, caller in self._callers if caller.owner == owner), None)
        return KEYLESS if found is None and self.is_open and owner == KEYLESS.owner else found


def _owner(key: bytes, secret: bytes | None) -> str:
    if secret is None:
        return hashlib.scrypt(key, salt=b"quire-owner", n=2**10, r=8, p=1, dklen=16).hex()
    return hashlib.blake2b(key, key=secret, digest_size=16, person=b"quire-owner").hexdigest()


def read_api_keys(config: ServerConfig) -> APIKeys:
    """The keys that the settings and the key file name.

    Raises:
        ConfigError: a key stands there twice, or the key file cannot be used.
    """
    named = [] if config.api_key_file is None else _read_key_file(Path(config.api_key_file).expanduser())
    plain = [_NamedKey(None, key, False) for key in config.api_key]
    admins = [_NamedKey(None, key, True) for key in config.admin_api_key]
    keys = [*named, *plain, *admins]
    names: set[str] = set()
    for each in keys:
        if each.key in names:
            where = "" if each.name is None else f" (at {each.name!r} in the key file)"
            raise ConfigError(f"an API key is given twice{where}; each must be one caller's", field="api_key")
        names.add(each.key)
    return APIKeys(keys, _owner_secret(config) if keys else None)


def _owner_secret(config: ServerConfig) -> bytes | None:
    """Kept beside the response store, so that what a key owned before a restart is its own afterwards. None where
    there is no such file: servers that share a store of another make must know owners alike."""
    path = store_path(config)
    if path is not None:
        with contextlib.suppress(OSError):
            return kept_key(Path(f"{path.expanduser()}.key"))
    return None


def _read_key_file(path: Path) -> list[_NamedKey]:
    """Keys of a YAML file: `NAME: KEY`, or `NAME: {key: KEY, admin: true, tokens_per_minute: N}` with any of the fields
    of `KeyLimits`, one for each caller."""
    keys = [_named_key(path, name, value) for name, value in _mapping(path)]
    names = [str(each.name) for each in keys]
    for name in names:
        if not name.strip() or not name.isprintable():
            raise _file_error(path, f"names of keys must be printable text, got {name!r}")
        if names.count(name) > 1:
            raise _file_error(path, f"the name {name!r} stands there twice")
    if not keys:
        raise _file_error(path, "it holds no keys; write one `name: key` on each line")
    return keys


def _named_key(path: Path, name: str, value: yaml.Node) -> _NamedKey:
    given = {"key": value}
    if isinstance(value, yaml.MappingNode):
        given = {_text(field): each for field, each in value.value}
    if unknown := given.keys() - {"key", "admin", *_LIMITS}:
        raise _file_error(path, f"{name!r} may have key, admin, {', '.join(_LIMITS)}, not {min(unknown)!r}")
    key, admin = _text(given.get("key")), _text(given.get("admin")) or "false"
    if (complaint := complaint_about_key(key)) is not None:
        raise _file_error(path, f"the key of {name!r} {complaint}")
    if admin.lower() not in ("true", "false"):
        raise _file_error(path, f"admin of {name!r} must be true or false")
    limits = {field: _limit(path, name, field, given[field]) for field in _LIMITS if field in given}
    return _NamedKey(name, key, admin.lower() == "true", KeyLimits(**limits))


def _limit(path: Path, name: str, field: str, node: yaml.Node) -> int:
    text = _text(node)
    if not (text.isascii() and text.isdigit() and 0 < int(text) < 2**53):
        raise _file_error(path, f"{field} of {name!r} must be a whole number above 0")
    return int(text)


def _text(node: yaml.Node | None) -> str:
    """What stands there, also where YAML would read a number; "" for null and for what is no text."""
    is_text = isinstance(node, yaml.ScalarNode) and node.tag != "tag:yaml.org,2002:null"
    return str(node.value) if node is not None and is_text else ""


def _mapping(path: Path) -> list[tuple[str, yaml.Node]]:
    """(name, value) in the order of the file, names that stand there twice included."""
    try:
        with path.open(encoding="utf-8") as file:
            _check_mode(path, stat.S_IMODE(os.fstat(file.fileno()).st_mode))
            root = yaml.compose(file, Loader=yaml.SafeLoader)
    except (OSError, UnicodeDecodeError) as error:
        raise _file_error(path, getattr(error, "strerror", None) or "it is not UTF-8") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)  # its message would show the line
        where = "" if mark is None else f" (line {mark.line + 1})"
        raise _file_error(path, f"it is not YAML{where}") from None
    if root is None:
        return []
    if not isinstance(root, yaml.MappingNode):
        raise _file_error(path, "it must hold one `name: key` on each line")
    return [(_text(name), value) for name, value in root.value]


def _check_mode(path: Path, mode: int) -> None:
    if mode & 0o022:
        raise _file_error(path, f"others may write to it (mode {mode:o}); run `chmod 600` on it")
    if mode & 0o044:
        _logger.warning("quire: others may read the key file %s (mode %o); run `chmod 600` on it", path, mode)


def _file_error(path: Path, what: str) -> ConfigError:
    return ConfigError(f"cannot use the key file {str(path)!r}: {what}", field="api_key_file")

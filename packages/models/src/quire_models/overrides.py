"""Fields of config.json that the user replaces when a model is loaded (`hf_overrides`). Free of torch.

Knows objects and the two spellings of rotary embeddings; which fields a network reads is known after it has read them.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import Any

from quire_interfaces import ConfigError

__all__ = ["check_overrides_read", "overridden"]


def overridden(values: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """A config.json with some fields replaced.

    Args:
        values: The file's.
        overrides: Field -> value; objects inside objects are merged, null takes a field away.

    Raises:
        ConfigError: the older spelling of a rotary embedding for a file that gives one for each kind of layers.
    """
    return _merged(values, _respelled(values, overrides))


def _merged(values: Mapping[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    result = dict(values)
    for name, value in overrides.items():
        old = result.get(name)
        result[name] = _merged(old, value) if isinstance(old, Mapping) and isinstance(value, Mapping) else value
    return result


def _respelled(values: Mapping[str, Any], overrides: Mapping[str, Any]) -> Mapping[str, Any]:
    """`rope_scaling` and `rope_theta` as members of `rope_parameters` where the file has these: they come before the
    older fields, which would be read and make no difference."""
    older = [name for name in ("rope_scaling", "rope_theta") if name in overrides]
    parameters = values.get("rope_parameters")
    if not older or not isinstance(parameters, Mapping) or "rope_parameters" in overrides:
        return overrides
    if any(isinstance(value, Mapping) for value in parameters.values()):
        raise ConfigError(
            f"hf_overrides has {older[0]}, but config.json has rope_parameters for each kind of layers "
            f"({', '.join(parameters)}): override the members of rope_parameters",
            field="hf_overrides",
        )
    result = {name: value for name, value in overrides.items() if name not in older}
    scaling = overrides.get("rope_scaling", {})
    if scaling is not None and not isinstance(scaling, Mapping):
        raise ConfigError(f"hf_overrides: rope_scaling must be an object, is {scaling!r}", field="hf_overrides")
    # Without scaling there remains what the base is.
    members = dict(scaling) if scaling is not None else dict.fromkeys(parameters.keys() - {"rope_theta"})
    if "rope_theta" in overrides:
        members["rope_theta"] = overrides["rope_theta"]
    if "type" in members and "rope_type" not in members:
        members["rope_type"] = members.pop("type")
    return {**result, "rope_parameters": members}


def check_overrides_read(names: Iterable[str], known: Iterable[str], reader: str) -> None:
    """Whether each override makes a difference.

    Args:
        names: Overridden fields.
        known: Fields that `reader` reads.
        reader: Who reads config.json, for the message.

    Raises:
        ConfigError: a field that nobody reads, with the nearest one that is read.
    """
    known = set(known)
    for name in names:
        if name not in known:
            nearest = difflib.get_close_matches(name, known, n=1, cutoff=0.6)
            hint = f"; did you mean {nearest[0]!r}?" if nearest else ""
            raise ConfigError(
                f"hf_overrides has {name!r}, which {reader} does not read from config.json: it would change "
                f"nothing{hint}",
                field="hf_overrides",
            )

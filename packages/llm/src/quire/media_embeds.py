"""Embeddings that callers have computed, in place of the images, videos and sounds of a prompt.

Knows the shapes in which they come: parts of the chat API, and `multi_modal_data` of Python.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import quire_multimodal
from quire_interfaces import Modality
from quire_multimodal import MediaError

__all__ = ["EmbedsItem", "as_array", "embeds_of_part", "embeds_of_value"]


class EmbedsItem(NamedTuple):
    """The embeddings of one item."""

    value: Any
    """Numbers [N, width], or a file of them as bytes or in base64."""
    facts: Mapping[str, Any]
    """What positions are counted from: `MediaSource.facts`."""


def as_array(value: Any) -> Any:
    """A tensor as the numpy array of its numbers, bfloat16 as float32; anything else as it is. Imports no torch."""
    if not hasattr(value, "detach"):
        return value
    return (value.float() if value.is_floating_point() else value).detach().cpu().numpy()


def embeds_of_part(part: Mapping[str, Any], kind: str) -> EmbedsItem | None:
    """The embeddings of a part such as `{"type": "image_embeds", "image_embeds": "..."}`; None where it has none.

    Args:
        part: Of a content. Its value is what `torch.save` or `numpy.save` writes, in base64, or an object of such files
            with the grid of patches beside them: `{"image_embeds": "...", "image_grid_thw": "..."}`.
        kind: Its type.

    Raises:
        MediaError: the object lacks the embeddings, or has something else.
    """
    value = part.get(kind)
    if value is None:
        return None
    fields = dict(value) if isinstance(value, Mapping) else {kind: value}
    embeds = fields.pop(kind, None)
    if embeds is None:
        raise MediaError(f"{kind} must be embeddings, or an object that has them as {kind!r}")
    return EmbedsItem(as_array(embeds), _facts(fields))


def embeds_of_value(value: Any, modality: Modality) -> list[EmbedsItem] | None:
    """The embeddings that a value of `multi_modal_data` holds, one entry per item; None for what is no embeddings.

    Args:
        value: Floating-point numbers [N, width] or [items, N, width], a list of such of one item each, or a dictionary
            `{"image_embeds": ..., "image_grid_thw": ...}`, in which all items may follow one another, [sum of N,
            width], with a grid [items, 3]. Of sounds, arrays are samples, and tensors embeddings.
        modality: Of the items.

    Raises:
        MediaError: grids that do not fit the embeddings.
    """
    name = f"{modality}_embeds"
    if isinstance(value, Mapping) and name in value:
        fields = dict(value)
        items = _embeds_items(fields.pop(name))
        if items is None:
            raise MediaError(f"{name} must be floating-point numbers [N, width], or a list of such")
        return _with_facts(items, _facts(fields), modality)
    several = value if isinstance(value, Sequence) and not isinstance(value, (str, bytes)) else (value,)
    if modality is Modality.AUDIO and not all(hasattr(each, "detach") for each in several):
        return None  # arrays of sounds have channels
    return _embeds_items(value)


def _embeds_items(value: Any) -> list[EmbedsItem] | None:
    if isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
        if not value or not all(_num_dims(each) == 2 for each in value):
            return None
        return [EmbedsItem(as_array(each), {}) for each in value]
    array, num_dims = as_array(value), _num_dims(value)
    if num_dims == 2:
        return [EmbedsItem(array, {})]
    return [EmbedsItem(each, {}) for each in array] if num_dims == 3 else None


def _num_dims(value: Any) -> int | None:
    """Dimensions of floating-point numbers; None for anything else. Pixels are whole numbers, and are not meant."""
    array = as_array(value)
    is_float = getattr(getattr(array, "dtype", None), "kind", None) == "f"
    return array.ndim if is_float else None


def _facts(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {name: quire_multimodal.read_fact(name, as_array(value)) for name, value in fields.items()}


def _with_facts(items: list[EmbedsItem], facts: Mapping[str, Any], modality: Modality) -> list[EmbedsItem]:
    """The items, each with its own row of the facts; taken apart by their grids where they follow one another."""
    if not facts:
        return items
    grid = facts.get(f"{modality}_grid_thw")
    num_items = max(map(len, facts.values()))
    if len(items) == 1 and grid is not None and num_items == len(grid) > 1:
        patches = [time * height * width for time, height, width in grid]
        merged, rest = divmod(sum(patches), len(items[0].value))  # patches that become one embedding
        if rest or any(each % merged for each in patches):
            raise MediaError(f"{modality}_grid_thw tells of other numbers of embeddings than there are")
        ends = [sum(patches[: index + 1]) // merged for index in range(num_items)]
        rows = items[0].value
        items = [EmbedsItem(rows[begin:end], {}) for begin, end in zip([0, *ends], ends, strict=False)]
    if any(len(each) != len(items) for each in facts.values()):
        raise MediaError(f"{', '.join(facts)} must have one row for each of {len(items)} items")
    return [
        item._replace(facts={name: [rows[index]] for name, rows in facts.items()}) for index, item in enumerate(items)
    ]

"""What texts are, in Cohere's words: the prompts of the checkpoint that they stand for."""

from __future__ import annotations

import reprlib
from collections.abc import Mapping

from quire_interfaces import RequestError

__all__ = ["prompt_of_input_type"]

_INPUT_TYPES: dict[str, tuple[str, ...]] = {
    "search_query": ("query", "retrieval.query"),
    "search_document": ("document", "passage", "corpus", "retrieval.passage"),
    "classification": (),
    "clustering": ("separation",),
    "image": (),
}
"""Cohere's names -> names of prompts in sentence-transformers' checkpoints, Jina's among them, of which the first one
is taken."""
_SIDES = ("query", "document")
"""What a text is to a model of late interaction (ColBERT), which marks them so."""


def prompt_of_input_type(
    input_type: str | None, prompts: Mapping[str, str], *, is_late_interaction: bool = False
) -> str | None:
    """Which of the checkpoint's prompts goes before each text; None for its default.

    Cohere's own names are those of prompts, or stand for the names that sentence-transformers gives to prompts of
    queries and of documents; a checkpoint without such prompts reads the texts as they are. Models of late interaction
    know queries and documents without prompts.

    Args:
        input_type: As the request has it.
        prompts: Of the checkpoint.
        is_late_interaction: Whether the model is one of late interaction.

    Raises:
        RequestError: it is neither a name of Cohere's nor of a prompt.
    """
    known = [*prompts, *(_SIDES if is_late_interaction else ())]
    if input_type is None or input_type in known:
        return input_type
    if input_type not in _INPUT_TYPES:
        names = ", ".join(map(repr, dict.fromkeys([*known, *_INPUT_TYPES])))
        raise RequestError(f"Unsupported input_type {reprlib.repr(input_type)}; it may be {names}", param="input_type")
    return next((name for name in _INPUT_TYPES[input_type] if name in known), None)

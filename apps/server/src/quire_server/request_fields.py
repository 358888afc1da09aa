"""Types of the fields of request bodies, with their bounds.

Lists are read up to the first wrong element, and what is too long is refused before its elements are looked at: half a
million errors would take a second to build.
"""

from __future__ import annotations

import functools
from typing import Annotated, Any

from pydantic import BeforeValidator, Field
from pydantic_core import PydanticCustomError

from quire_server.config import MAX_PROMPTS

__all__ = [
    "MAX_MESSAGES", "MAX_TOOLS", "Int", "Messages", "Metadata", "Objects", "PromptEmbeds", "Prompts", "Texts",
    "TokenId", "TokenIds", "Tools", "at_most",
]  # fmt: skip

MAX_MESSAGES = 20_000
"""Of one conversation."""
MAX_TOOLS = 2048
"""Of one request."""


def at_most(most: int) -> BeforeValidator:
    """A list or an object must have no more elements; found before they are looked at."""
    return BeforeValidator(functools.partial(_at_most, most))


def _at_most(most: int, value: Any) -> Any:
    if isinstance(value, (list, dict)) and len(value) > most:
        raise PydanticCustomError(
            "too_many", "holds {num} elements, at most {most} are allowed", {"num": len(value), "most": most}
        )
    return value


def _prompts_at_most(value: Any) -> Any:
    several = isinstance(value, list) and value and not isinstance(value[0], int)
    return _at_most(MAX_PROMPTS, value) if several else value


TokenId = Annotated[int, Field(ge=0, lt=2**31)]
TokenIds = Annotated[list[TokenId], Field(fail_fast=True)]
Texts = Annotated[list[str], Field(fail_fast=True)]
Objects = Annotated[list[dict[str, Any]], Field(fail_fast=True)]
Prompts = Annotated[
    str | TokenIds | Texts | Annotated[list[TokenIds], Field(fail_fast=True)], BeforeValidator(_prompts_at_most)
]
PromptEmbeds = Annotated[Texts, at_most(MAX_PROMPTS)]
Messages = Annotated[Objects, at_most(MAX_MESSAGES)]
Tools = Annotated[Objects, at_most(MAX_TOOLS)]
Int = Annotated[int, Field(ge=-(2**63), lt=2**63)]
"""No count is larger; JSON's numbers have no end."""
Metadata = Annotated[
    dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]],
    Field(max_length=16),
    at_most(16),
]
"""Notes of the client's, within OpenAI's bounds."""

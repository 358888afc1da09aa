"""Whether the grammar of a text can be used at all: checked by itself, before it becomes a part of a larger one.

Cheap, and without a vocabulary: what is too large for a backend is found when it compiles. The library is imported
for the first grammar: a server that is sent none pays for none.
"""

from __future__ import annotations

import functools
import json

from quire_interfaces import RequestError

__all__ = ["check_text_grammar", "text_content"]


def text_content(syntax: str, definition: str) -> dict[str, str]:
    """The grammar as the content of a structural tag.

    Args:
        syntax: "lark" or "regex".
        definition: The grammar.
    """
    return {"type": "regex", "pattern": definition} if syntax == "regex" else {"type": "grammar", "grammar": definition}


def check_text_grammar(syntax: str, definition: str, param: str) -> None:
    """Check one grammar. May take some milliseconds.

    Args:
        syntax: "lark" or "regex".
        definition: The grammar.
        param: The field that holds it, for the error.

    Raises:
        RequestError: it cannot be used; the message says why.
    """
    fault = _fault(syntax, definition)
    if fault:
        raise RequestError(f"{param} cannot be used: {fault}", param=param, code="invalid_grammar")


@functools.lru_cache(maxsize=256)
def _fault(syntax: str, definition: str) -> str:
    """What is wrong with it as it is written, and as the text of a JSON string; empty for nothing."""
    import llguidance

    from quire_structured_output.structural_tag import structural_tag_to_lark

    content = text_content(syntax, definition)
    for form in (content, {"type": "json_string", "content": content}):
        try:
            lark = structural_tag_to_lark(json.dumps({"format": form}), "[ ]?")
            message = llguidance.LLMatcher.validate_grammar(llguidance.LLMatcher.grammar_from_lark(lark))
        except Exception as error:  # the library's translators raise bare Exception, among others
            message = str(error) or "it is nested too deeply"
        if message:
            return " ".join(message.split("\n   ")[0].split())[:400]
    return ""

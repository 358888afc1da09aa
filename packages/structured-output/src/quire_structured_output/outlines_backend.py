"""The outlines-core backend: schemas, patterns and choices as one finite automaton over the vocabulary.

Everything is computed at compile time, so that masks are table look-ups; the price is a compile that grows with the
vocabulary, and nothing that no finite automaton can follow (recursion, grammars, structural tags). Needs the library
`outlines-core`; knows its calls and messages.
"""

from __future__ import annotations

import ctypes
import json
import re

import outlines_core
from outlines_core.json_schema import build_regex_from_schema

from quire_interfaces import GrammarSpec, RequestError
from quire_structured_output.probe import probe
from quire_structured_output.schema_options import schema_of
from quire_structured_output.vocabulary import Vocabulary

__all__ = ["OutlinesBackend"]

WHITESPACE = r"[ \t\r\n]{0,8}"

_MAX_ROLLBACK = 1024

_KEYWORDS = frozenset(
    "type properties required items minItems maxItems minLength maxLength pattern enum const anyOf $ref $defs "
    "definitions title description default examples additionalProperties $schema $id".split()
)
"""What the library follows, or may ignore; it would pass over others in silence."""


class OutlinesBackend:
    """Implements `quire_interfaces.GrammarBackend`.

    Args:
        vocabulary: The model's tokens.
    """

    name = "outlines"
    kinds = frozenset({"json", "regex", "choice"})

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.vocab_size = vocabulary.vocab_size
        self.eos_token_ids = vocabulary.eos_token_ids
        ids: dict[bytes | str, list[int]] = {}
        for token_id, piece in enumerate(vocabulary.tokens):
            if piece and token_id not in vocabulary.special_ids and token_id not in vocabulary.eos_token_ids:
                ids.setdefault(piece, []).append(token_id)
        self._vocabulary = outlines_core.Vocabulary(vocabulary.eos_token_ids[0], ids)

    def compile(self, spec: GrammarSpec) -> _Grammar:
        """Make an index of the pattern or schema over the vocabulary."""
        if spec.kind not in self.kinds:
            raise _refusal(spec, f"the backend {self.name!r} takes {', '.join(sorted(self.kinds))}")
        try:
            pattern = _pattern(spec)
        except RequestError:
            raise
        except Exception as error:  # the library raises what its Rust side makes of it
            raise _refusal(spec, str(error)) from None
        try:
            index = outlines_core.Index(pattern, self._vocabulary)
        except Exception as error:  # likewise
            raise _refusal(spec, str(error)) from None
        grammar = _Grammar(index, self.eos_token_ids)
        probe(grammar.new_matcher(), self.vocab_size, self.eos_token_ids, spec)
        return grammar


class _Grammar:
    """A `CompiledGrammar` over an index, which never changes."""

    def __init__(self, index: outlines_core.Index, eos_token_ids: tuple[int, ...]) -> None:
        self._index = index
        self._eos_token_ids = eos_token_ids

    def new_matcher(self) -> _Matcher:
        return _Matcher(outlines_core.Guide(self._index, _MAX_ROLLBACK), self._eos_token_ids)


class _Matcher:
    """A `GrammarMatcher` over the library's guide."""

    allows_all = False

    def __init__(self, guide: outlines_core.Guide, eos_token_ids: tuple[int, ...]) -> None:
        self._guide = guide
        self._eos_token_ids = eos_token_ids
        self.is_terminated = False

    def fill_bitmask(self, bitmask: memoryview) -> None:
        words = bitmask.cast("B").cast("I")
        words[:] = memoryview(bytes(words.nbytes)).cast("I")
        address = ctypes.addressof(ctypes.c_char.from_buffer(bitmask))
        self._guide.write_mask_into(address, len(words), 4)
        eos = self._eos_token_ids
        if words[eos[0] // 32] >> (eos[0] % 32) & 1:
            for each in eos[1:]:
                words[each // 32] |= 1 << (each % 32)

    def accept(self, token_id: int) -> bool:
        if self.is_terminated:
            return False
        if token_id in self._eos_token_ids:
            self.is_terminated = bool(self._guide.accepts_tokens([self._eos_token_ids[0]])) or self._guide.is_finished()
            return self.is_terminated
        if not self._guide.accepts_tokens([token_id]):
            return False
        self._guide.advance(token_id, return_tokens=False)
        return True

    def rollback(self, num_tokens: int) -> None:
        num_tokens -= self.is_terminated and num_tokens > 0
        if num_tokens:
            self._guide.rollback_state(num_tokens)
        self.is_terminated = False

    def forced_token_ids(self) -> list[int]:
        """None: the library knows tokens, not the text they have in common."""
        return []


def _pattern(spec: GrammarSpec) -> str:
    if spec.kind == "regex":
        return spec.text
    if spec.kind == "choice":
        # Of alternatives, the library follows the first that matches: what another one begins with must come behind it.
        texts = sorted(json.loads(spec.text), key=len, reverse=True)
        return "|".join(f"({re.escape(text)})" for text in texts)
    schema = schema_of(spec)
    _check_keywords(spec, schema)
    whitespace = WHITESPACE if spec.whitespace_pattern is None else spec.whitespace_pattern
    pattern: str = build_regex_from_schema(json.dumps(schema), whitespace_pattern=whitespace)
    return pattern


def _check_keywords(spec: GrammarSpec, schema: object) -> None:
    """Refuse by name what the library would not follow."""
    if not isinstance(schema, dict):
        raise _refusal(spec, f"every schema must be an object, got {schema!r}")
    unknown = sorted(set(schema) - _KEYWORDS)
    if isinstance(schema.get("additionalProperties"), dict):
        unknown.append("additionalProperties with a schema")
    if "pattern" in schema and ("minLength" in schema or "maxLength" in schema):
        unknown.append("pattern together with a length")
    if unknown:
        raise _refusal(spec, f"keywords that the backend 'outlines' does not follow: {', '.join(unknown)}")
    parts = [schema[key] for key in ("items",) if key in schema]
    parts += schema.get("anyOf", [])
    for key in ("properties", "$defs", "definitions"):
        parts += schema.get(key, {}).values()
    for part in parts:
        _check_keywords(spec, part)


def _refusal(spec: GrammarSpec, reason: str) -> RequestError:
    param = f"structured_outputs.{spec.kind}"
    return RequestError(f"{param} cannot be used: {reason[:600]}", param=param, code="invalid_grammar")

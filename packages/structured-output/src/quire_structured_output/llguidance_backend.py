"""The llguidance backend: every kind of constraint, through a lexer of derivatives and an Earley parser in Rust.

Knows the library's calls, limits and messages; knows no engine. The library lets go of the interpreter lock while it
compiles and while it computes masks.
"""

from __future__ import annotations

import ctypes
import json
import re
import time
from typing import TYPE_CHECKING, Any

import llguidance
from llguidance.gbnf_to_lark import any_to_lark

from quire_interfaces import GrammarSpec, RequestError
from quire_structured_output.allowance import run_apart
from quire_structured_output.blame import largest_part
from quire_structured_output.probe import follow, probe
from quire_structured_output.refused_part import RefusedPart, refused_part
from quire_structured_output.schema_options import json_escapes, schema_of, to_the_letter
from quire_structured_output.structural_tag import structural_tag_to_lark
from quire_structured_output.trials import TriedGrammar
from quire_structured_output.vocabulary import Vocabulary

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

__all__ = ["LLGuidanceBackend"]

WHITESPACE = r"[ \t\r\n]{0,24}"
"""Between the tokens of JSON. Bounded: a model that likes white space must not be able to go on with it for ever."""

SHORT_S = 0.004
"""What compiles within this time, about a system's shortest turn, compiles where it is."""

_TOO_LARGE = (
    "too many",
    "Too many",
    "too big",
    "too large",
    "too complex",
    "limit exceeded",
    "limit for",
    "items; max is",
    "fuel",
    "recursion limit",
)


def _limits() -> llguidance.LLParserLimits:
    """About half of the library's own bounds on the work of one step: some 7 ms, should a grammar reach them."""
    return llguidance.LLParserLimits(
        initial_lexer_fuel=1_000_000,
        step_lexer_fuel=100_000,
        step_max_items=30_000,
        max_lexer_states=50_000,
        max_grammar_size=250_000,
        verbose_errors=False,
    )


class LLGuidanceBackend:
    """Implements `quire_interfaces.GrammarBackend`.

    Args:
        vocabulary: The model's tokens.
    """

    name = "llguidance"
    kinds = frozenset({"json", "regex", "choice", "grammar", "structural_tag"})

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.vocabulary = vocabulary
        self.vocab_size = vocabulary.vocab_size
        self.eos_token_ids = vocabulary.eos_token_ids
        self._eos_token_ids = frozenset(vocabulary.eos_token_ids)
        # An end token ends the output, so that a marker cannot be made of one.
        markers = vocabulary.special_ids - self._eos_token_ids
        self._special = {vocabulary.tokens[token_id].decode("utf-8", "replace"): token_id for token_id in markers}
        self._tokenizer = llguidance.LLTokenizer(
            llguidance.TokenizerWrapper(_Tokenizer(vocabulary)),
            n_vocab=vocabulary.vocab_size,
            eos_token=list(vocabulary.eos_token_ids),
        )

    def compile(self, spec: GrammarSpec) -> _Grammar:
        """Compile, and walk some tokens into the grammar, so that one whose every step is slow is refused."""
        matcher = self._new_matcher(spec, self._translated(spec))
        self._probed(spec, matcher)
        return _Grammar(matcher, spec, self._eos_token_ids)

    def try_out(self, spec: GrammarSpec) -> TriedGrammar:
        """What `compile` does, for another process to follow. Raises RequestError as `compile` does."""
        source = self._translated(spec)
        start_s = time.thread_time()
        matcher = self._new_matcher(spec, source)
        compile_s = time.thread_time() - start_s
        return TriedGrammar(source, tuple(self._probed(spec, matcher)), compile_s)

    def compile_tried(self, spec: GrammarSpec, tried: TriedGrammar, *, starve: bool = False) -> _Grammar:
        """Compile what a trial found harmless, in a process of its own where that takes long."""
        if starve or tried.compile_s > SHORT_S:
            matcher = run_apart(lambda: self._new_matcher(spec, tried.source), starve=starve)
        else:
            matcher = self._new_matcher(spec, tried.source)
        follow(_Matcher(matcher, spec, self._eos_token_ids), self.vocab_size, tried.walk)
        return _Grammar(matcher, spec, self._eos_token_ids)

    def _probed(self, spec: GrammarSpec, matcher: llguidance.LLMatcher) -> list[int]:
        """The way of a trial walk. What it taught the lexer stays in the matcher, and every copy of it has it from the
        start."""
        return probe(_Matcher(matcher, spec, self._eos_token_ids), self.vocab_size, self._eos_token_ids, spec)

    def _new_matcher(self, spec: GrammarSpec, source: str) -> llguidance.LLMatcher:
        matcher = llguidance.LLMatcher(self._tokenizer, source, log_level=0, limits=_limits())
        if matcher.is_error():
            raise self._refusal_with_place(spec, matcher.get_error())
        return matcher

    def _translated(self, spec: GrammarSpec) -> str:
        try:
            return self._source(spec)
        except RequestError:
            raise
        except Exception as error:  # the library's translators raise bare Exception, among others
            raise self._refusal_with_place(spec, str(error) or "nested too deeply") from None

    def _refusal_with_place(self, spec: GrammarSpec, reason: str) -> RequestError:
        if spec.kind not in ("json", "structural_tag") or _is_too_large(reason):
            return _refusal(spec, reason)
        return _refusal(spec, reason, refused_part(spec, self._reason_of))

    def _reason_of(self, schema: Any) -> str | None:
        """Why a schema is refused by itself; None where it is not."""
        try:
            source = self._source(GrammarSpec("json", json.dumps(schema)))
        except Exception as error:
            return str(error)
        matcher = llguidance.LLMatcher(self._tokenizer, source, log_level=0, limits=_limits())
        return _first_paragraph(matcher.get_error()) if matcher.is_error() else None

    def _source(self, spec: GrammarSpec) -> str:
        if spec.kind == "json":
            options: JsonCompileOptions = {"whitespace_pattern": WHITESPACE}
            if spec.whitespace_pattern == "":
                options = {"whitespace_flexible": False}
            elif spec.whitespace_pattern is not None:
                options = {"whitespace_pattern": spec.whitespace_pattern}
            schema = json.dumps(to_the_letter(schema_of(spec)), ensure_ascii=False)
            if escapes := json_escapes(schema):
                options["json_allowed_escapes"] = escapes
            return llguidance.LLMatcher.grammar_from_json_schema(schema, overrides=options)
        if spec.kind == "regex":
            return llguidance.LLMatcher.grammar_from_regex(spec.text)
        if spec.kind == "choice":
            return llguidance.grammar_from("choice", spec.text)
        if spec.kind == "structural_tag":
            return llguidance.LLMatcher.grammar_from_lark(structural_tag_to_lark(spec.text, WHITESPACE, self._special))
        return llguidance.LLMatcher.grammar_from_lark(any_to_lark(spec.text))


class _Tokenizer:
    """What `llguidance.TokenizerWrapper` reads."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.eos_token_id = vocabulary.eos_token_ids[0]
        self.bos_token_id = None
        self.tokens = list(vocabulary.tokens)
        self.special_token_ids = sorted(vocabulary.special_ids)
        self._encode = vocabulary.encode

    def __call__(self, text: bytes | str) -> list[int]:
        return self._encode(text.decode("utf-8") if isinstance(text, bytes) else text)


class _Grammar:
    """A `CompiledGrammar`: a matcher that is copied and never moves."""

    def __init__(self, matcher: llguidance.LLMatcher, spec: GrammarSpec, eos_token_ids: frozenset[int]) -> None:
        self._matcher = matcher
        self._spec = spec
        self._eos_token_ids = eos_token_ids

    def new_matcher(self) -> _Matcher:
        return _Matcher(self._matcher.deep_copy(), self._spec, self._eos_token_ids)


class _Matcher:
    """A `GrammarMatcher` over the library's."""

    allows_all = False

    def __init__(self, matcher: llguidance.LLMatcher, spec: GrammarSpec, eos_token_ids: frozenset[int]) -> None:
        self._matcher = matcher
        self._spec = spec
        self._eos_token_ids = eos_token_ids
        self.is_terminated = False

    def fill_bitmask(self, bitmask: memoryview) -> None:
        address = ctypes.addressof(ctypes.c_char.from_buffer(bitmask))
        self._matcher.unsafe_compute_mask_ptr(address, bitmask.nbytes)
        if self._matcher.is_error():
            raise _refusal(self._spec, self._matcher.get_error())

    def accept(self, token_id: int) -> bool:
        if self.is_terminated:
            return False
        if token_id in self._eos_token_ids and self._matcher.is_accepting():
            # The library counts an end token in some states and not in others, so it never sees the last one.
            self.is_terminated = True
            return True
        # An invalid token would put the library's matcher into an error it never leaves.
        return self._matcher.validate_tokens([token_id]) == 1 and self._matcher.consume_token(token_id)

    def rollback(self, num_tokens: int) -> None:
        num_tokens -= self.is_terminated and num_tokens > 0
        if num_tokens:
            self._matcher.rollback(num_tokens)
        self.is_terminated = False

    def forced_token_ids(self) -> list[int]:
        tokens = self._matcher.compute_ff_tokens()
        return tokens[: self._matcher.validate_tokens(tokens)] if tokens else tokens


def _first_paragraph(reason: str) -> str:
    """The library appends where in its own form of the grammar, or in its code, it stopped; the first paragraph is what
    users wrote."""
    lines = re.split("\n   1 \\||<backtrace>", reason)[0].strip().splitlines()
    return " ".join(line.strip() for line in lines)[:600]


def _is_too_large(reason: str) -> bool:
    return any(words in reason for words in _TOO_LARGE)


def _refusal(spec: GrammarSpec, reason: str, part: RefusedPart | None = None) -> RequestError:
    param = f"structured_outputs.{spec.kind}"
    reason = _first_paragraph(reason)
    if part is not None:
        param, reason = part.origin or param, f"at {part.pointer or '/'}: {_named(part.reason)}"
    if _is_too_large(reason):
        return RequestError(
            f"{param} is too large or too complex ({reason}); the largest part is {largest_part(spec)}",
            param=param,
            code="grammar_too_large",
        )
    return RequestError(f"{param} cannot be used: {reason}", param=param, code="invalid_grammar")


def _named(reason: str) -> str:
    """The library's reason in the words of JSON Schema."""
    if match := re.match(r"Unimplemented keys: \[(.*)\]", reason):
        names = match[1].replace('"', "")
        return f"the keyword {names} is not supported here; leave it out, or write the schema without it"
    if reason.startswith("oneOf constraints are not supported"):
        return "oneOf is supported only where a type or a constant tells its parts apart; use anyOf, or a discriminator"
    return reason

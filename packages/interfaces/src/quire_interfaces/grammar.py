"""Seams of structured output: from the content of a constraint to the tokens that may come next. Free of tensors.

A *bitmask* is a writable buffer of little-endian 32-bit words; bit i % 32 of word i // 32 says whether token i may
come next. It has `ceil(vocab_size / 32)` words; bits of ids that are no tokens are 0.
"""

from __future__ import annotations

from typing import Protocol

from quire_interfaces.structured_outputs import GrammarSpec, StructuredOutputsParams

__all__ = ["CompiledGrammar", "GrammarBackend", "GrammarMatcher", "GrammarSource"]


class GrammarMatcher(Protocol):
    """Where one output stands in its grammar. One thread at a time; owned by whoever asked for it."""

    @property
    def allows_all(self) -> bool:
        """Whether any token may come next, so that no mask is needed."""

    @property
    def is_terminated(self) -> bool:
        """Whether an end token was accepted; nothing may follow."""

    def fill_bitmask(self, bitmask: memoryview) -> None:
        """Write which tokens may come next, the end tokens among them where the output may end.

        Args:
            bitmask: Exactly the words of one vocabulary, writable and contiguous; every word is written.

        Raises:
            RequestError: the grammar became too complex here, or no token can follow. The matcher is then of no
                further use.
        """

    def accept(self, token_id: int) -> bool:
        """Go on by one token. False, and nothing changes, when it may not come next."""

    def rollback(self, num_tokens: int) -> None:
        """Take back the last so many accepted tokens, at most as many as were accepted since `new_matcher`; undoing
        64 must always be possible."""

    def forced_token_ids(self) -> list[int]:
        """Tokens that come next because the grammar leaves no choice of text; may be empty although it leaves none."""


class CompiledGrammar(Protocol):
    """A grammar made ready for one vocabulary. Thread-safe."""

    def new_matcher(self) -> GrammarMatcher:
        """A matcher at the beginning of the output; cheap."""


class GrammarBackend(Protocol):
    """Makes grammars ready for one vocabulary. Thread-safe."""

    name: str
    kinds: frozenset[str]
    """The kinds of `GrammarSpec` that it compiles."""
    vocab_size: int
    eos_token_ids: tuple[int, ...]
    """Tokens that end an output; a mask holds all of them where the output may end."""

    def compile(self, spec: GrammarSpec) -> CompiledGrammar:
        """Compile, and do whatever the first masks would otherwise wait for. May take seconds.

        Raises:
            RequestError: `param` "structured_outputs" (or a field of it); the message says what is wrong with the
                content, or which keyword is not supported, or what is too large.
        """


class GrammarSource(Protocol):
    """Where a runner gets the matchers of its rows."""

    def new_matcher(self, params: StructuredOutputsParams) -> GrammarMatcher:
        """A matcher at the beginning of the output.

        Raises:
            RequestError: the grammar cannot be compiled.
        """

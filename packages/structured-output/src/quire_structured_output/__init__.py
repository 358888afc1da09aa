"""Constraints on the form of outputs: schemas, patterns, choices and grammars as masks of the next token."""

from quire_structured_output.backends import BACKENDS, make_backend, resolve_backend
from quire_structured_output.compiler import GrammarCompiler, check_size
from quire_structured_output.config import StructuredOutputConfig
from quire_structured_output.gate import GrammarGate
from quire_structured_output.matcher import OutputMatcher
from quire_structured_output.text_grammar import check_text_grammar, text_content
from quire_structured_output.vocabulary import Vocabulary

__version__ = "0.1.0"

__all__ = [
    "BACKENDS",
    "GrammarCompiler",
    "GrammarGate",
    "OutputMatcher",
    "StructuredOutputConfig",
    "Vocabulary",
    "check_size",
    "check_text_grammar",
    "make_backend",
    "resolve_backend",
    "text_content",
]

"""Spelling words letter by letter, forwards and backwards."""

from __future__ import annotations

from corpus.exchange import Exchange, ask
from corpus.words import Source

_SPELL = (
    'Spell "{w}".',
    'Spell the word "{w}".',
    "How do you spell {w}?",
    "spell {w}",
    'Please spell "{w}" for me.',
    'Can you spell "{w}"?',
    "Spell {w}",
    'Give me the letters of "{w}".',
    'What are the letters in "{w}"?',
    'Write "{w}" letter by letter.',
    "Could you spell {w}?",
    "Spell out {w}.",
)
_REVERSE = (
    'Reverse "{w}".',
    'Reverse the word "{w}".',
    "What is {w} backwards?",
    "reverse {w}",
    'Write "{w}" backwards.',
    'Can you reverse "{w}"?',
    "Reverse {w}",
    'Spell "{w}" backwards.',
    'Please write the word "{w}" in reverse.',
    "Spell {w} backwards.",
    "Could you reverse {w}?",
    'What does "{w}" look like backwards?',
)


def spell(source: Source) -> Exchange:
    """One word to spell."""
    word = source.word()
    question = source.rng.choice(_SPELL).format(w=word)
    return ask("spelling", question, " ".join(word), f'Spell the word "{word}".')


def reverse(source: Source) -> Exchange:
    """One word to write backwards; the letters forwards come first."""
    word = source.word()
    question = source.rng.choice(_REVERSE).format(w=word)
    forwards, backwards = " ".join(word), " ".join(reversed(word))
    return ask("reversing", question, f"{forwards}, backwards: {backwards}", f"{forwards}.", short=backwards)

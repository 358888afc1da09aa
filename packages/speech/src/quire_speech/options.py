"""How a recording is to be transcribed. Names and defaults follow OpenAI's Whisper and faster-whisper."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from quire_interfaces import RequestError, wrong_value
from quire_speech.languages import language_code

__all__ = ["TranscriptionOptions"]

DEFAULT_TEMPERATURES = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
_MAX_TEMPERATURE = 2.0
_MAX_BEAMS = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class TranscriptionOptions:
    """Options of one transcription.

    Raises:
        RequestError: with `param` set, when a value is out of range or two values contradict each other.
    """

    task: Literal["transcribe", "translate"] = "transcribe"
    """"translate" writes `to_language`, whatever is spoken."""
    to_language: str = "en"
    """Code or English name of the language that "translate" writes; its code, once the options are made."""
    language: str | None = None
    """Code (`en`) or English name of the spoken language; None to hear which it is."""
    prompt: str | None = None
    """Text that is taken as said before the recording begins: names, spellings, punctuation."""
    hotwords: str | None = None
    """Words that are likely to come, told to each window."""
    temperatures: tuple[float, ...] = DEFAULT_TEMPERATURES
    """Tried one after the other, until a window's text is neither repetitive nor improbable."""
    beam_size: int = 1
    """Width of the beam search at temperature 0; 1 for greedy."""
    best_of: int = 5
    """Samples that are drawn at temperatures above 0; the most probable one counts."""
    patience: float = 1.0
    """Factor of the number of finished beams that end a search (arXiv 2204.05424)."""
    length_penalty: float | None = None
    """Exponent of the length that divides the log probability of texts that are compared; None is 1."""
    logprobs: bool = False
    """Whether log probabilities of tokens are told."""
    word_timestamps: bool = False
    """Whether words get times."""
    timestamps: bool = True
    """Whether the model writes times of segments; without, a window is one segment."""
    compression_ratio_threshold: float | None = 2.4
    """A window whose text compresses better is tried again at the next temperature; None for no bound."""
    logprob_threshold: float | None = -1.0
    """A window whose mean log probability is lower is tried again at the next temperature; None for no bound."""
    no_speech_threshold: float | None = 0.6
    """A window is silent where the probability of no speech is above, and the mean log probability below its
    threshold; None for never."""
    condition_on_previous_text: bool = True
    """Whether a window reads the text of those before it."""
    prompt_reset_on_temperature: float = 0.5
    """A window decoded at a higher temperature is not read by those behind it."""
    suppress_blank: bool = True
    """Whether a text may neither be empty nor begin with a space."""
    suppress_tokens: tuple[int, ...] | None = None
    """Tokens that are never written; None for those that the checkpoint names."""
    max_initial_timestamp_s: float = 1.0
    """The first segment of a window begins at most so late in it."""
    max_tokens: int | None = None
    """Most tokens of a window; None for as many as fit."""
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    """Of samples at temperatures above 0."""

    def __post_init__(self) -> None:
        if self.task not in ("transcribe", "translate"):
            raise wrong_value("task", self.task, 'be "transcribe" or "translate"')
        for name in ("language", "prompt", "hotwords"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, str):
                raise wrong_value(name, value, "be a text")
        if not isinstance(self.to_language, str):
            raise wrong_value("to_language", self.to_language, "be a text")
        object.__setattr__(self, "to_language", language_code(self.to_language, "to_language"))
        self._check_temperatures()
        for name in _FLAGS:
            if not isinstance(getattr(self, name), bool):
                raise wrong_value(name, getattr(self, name), "be true or false")
        for name, (is_right, must) in _RANGES.items():
            value = getattr(self, name)
            if value is not None and not (_is_number(value) and is_right(value)):
                raise wrong_value(name, value, must)
        if self.suppress_tokens is not None:
            ids = tuple(self.suppress_tokens)
            if not all(isinstance(each, int) and not isinstance(each, bool) and each >= 0 for each in ids):
                raise wrong_value("suppress_tokens", self.suppress_tokens, "be a list of token ids")
            object.__setattr__(self, "suppress_tokens", ids)
        if self.logprobs and self.beam_size > 1:
            raise RequestError(
                "log probabilities of tokens are not told of beams; leave one of them out",
                param="logprobs",
                code="unsupported_combination",
            )
        if self.word_timestamps and not self.timestamps:
            raise RequestError(
                "word_timestamps need times of segments; leave timestamps at true",
                param="word_timestamps",
                code="unsupported_combination",
            )

    def _check_temperatures(self) -> None:
        values: Any = self.temperatures
        values = (values,) if _is_number(values) else tuple(values)
        must = f"be numbers from 0 to {_MAX_TEMPERATURE:g}, at least one"
        if not values or not all(_is_number(each) and 0 <= each <= _MAX_TEMPERATURE for each in values):
            raise wrong_value("temperatures", self.temperatures, must)
        object.__setattr__(self, "temperatures", tuple(float(each) for each in values))


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


_FLAGS = ("logprobs", "word_timestamps", "timestamps", "condition_on_previous_text", "suppress_blank")


def _whole(least: int, most: int | None = None) -> Callable[[float], bool]:
    return lambda value: isinstance(value, int) and value >= least and (most is None or value <= most)


_RANGES: dict[str, tuple[Callable[[float], bool], str]] = {
    "beam_size": (_whole(1, _MAX_BEAMS), f"be a whole number from 1 to {_MAX_BEAMS}"),
    "best_of": (_whole(1, _MAX_BEAMS), f"be a whole number from 1 to {_MAX_BEAMS}"),
    "patience": (lambda value: value > 0, "be a number above 0"),
    "length_penalty": (lambda value: 0 <= value <= 1, "be a number from 0 to 1"),
    "compression_ratio_threshold": (lambda value: value > 0, "be a number above 0"),
    "logprob_threshold": (lambda value: value <= 0, "be a number of at most 0"),
    "no_speech_threshold": (lambda value: 0 <= value <= 1, "be a number from 0 to 1"),
    "prompt_reset_on_temperature": (lambda value: value >= 0, "be a number of at least 0"),
    "max_initial_timestamp_s": (lambda value: 0 <= value <= 30, "be a number of seconds from 0 to 30"),
    "max_tokens": (_whole(1), "be a whole number of at least 1"),
    "top_p": (lambda value: 0 < value <= 1, "be a number above 0 and up to 1"),
    "top_k": (_whole(-1), "be a whole number of at least -1"),
    "min_p": (lambda value: 0 <= value <= 1, "be a number from 0 to 1"),
    "repetition_penalty": (lambda value: value > 0, "be a number above 0"),
    "presence_penalty": (lambda value: -2 <= value <= 2, "be a number from -2 to 2"),
    "frequency_penalty": (lambda value: -2 <= value <= 2, "be a number from -2 to 2"),
    "seed": (_whole(-(2**63), 2**64 - 1), "be a whole number of 64 bits"),
}
"""Field -> whether a number is right, and what it must be."""

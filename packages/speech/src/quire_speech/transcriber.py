"""A recording as windows that a network transcribes one by one (Radford et al. 2022, sec. 4.5): what each is asked,
what becomes of the answers. Knows no engine: whoever drives it answers.

    steps = Transcriber(recording, vocabulary, tokenizer, options).run()
    step = next(steps)
    while True:
        step = steps.send(answer_to(step))  # until StopIteration, whose value is the transcription

`MoreSound` is answered by adding to the recording or finishing it, a `Segment` by nothing, the others by what they say.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from quire_interfaces import RequestError
from quire_speech.features import FRAMES_PER_S
from quire_speech.options import TranscriptionOptions
from quire_speech.partial_text import Telling, compression_ratio
from quire_speech.recording import Recording
from quire_speech.results import Segment, TokenLogprob, Transcription
from quire_speech.segments import Piece, Timed, split_window
from quire_speech.vocabulary import SpeechVocabulary
from quire_speech.words import Alignment, WordTimes

__all__ = ["AlignTokens", "Decode", "Decoded", "MoreSound", "Probe", "Step", "TextTokenizer", "Transcriber"]


class TextTokenizer(Protocol):
    """Text to token ids and back."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]: ...

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str: ...


@dataclass(frozen=True, slots=True)
class MoreSound:
    """The next window is not there yet: add samples, or finish."""


@dataclass(frozen=True, slots=True, eq=False)
class Probe:
    """How probable are these tokens behind the prompt? Answered by their log probabilities."""

    features: NDArray[np.float32]
    """Of the window, [M, F]; the same array in all steps of a window."""
    prompt: tuple[int, ...]
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Decode:
    """Continue the prompt up to an end of text. Answered by the best of what was found (`Decoded`)."""

    features: NDArray[np.float32]
    prompt: tuple[int, ...]
    temperature: float
    max_tokens: int
    rules: dict[str, Any]
    """`extra_args.transcript_rules`."""
    options: TranscriptionOptions
    """Beams at temperature 0, samples above, and penalties."""
    telling: Telling = "nothing"


@dataclass(frozen=True, slots=True)
class Decoded:
    """A transcript of a window."""

    token_ids: tuple[int, ...]
    """Without the end of text."""
    sum_logprob: float
    """Of all tokens, the end of text included."""
    logprobs: tuple[TokenLogprob, ...] | None = None
    """Of each token, where the options ask for them."""


@dataclass(frozen=True, slots=True, eq=False)
class AlignTokens:
    """When is each token of a text said? Answered by an `Alignment`."""

    features: NDArray[np.float32]
    prompt: tuple[int, ...]
    """What the text stands behind: the start of a transcript, without times."""
    text_ids: tuple[int, ...]
    num_frames: int
    """Frames of the window that are sound."""


Step = MoreSound | Probe | Decode | AlignTokens | Segment
Answer = Mapping[int, float] | Decoded | Alignment | None
Steps = Generator[Step, Any, Transcription]


@dataclass(frozen=True, slots=True)
class _Attempt:
    """A window decoded at one temperature."""

    decoded: Decoded
    temperature: float
    avg_logprob: float
    compression_ratio: float


class Transcriber:
    """Transcribes one recording.

    Args:
        recording: Finished, or to be added to when it is asked.
        vocabulary: Of the checkpoint.
        tokenizer: Its text.
        options: How to transcribe.

    Raises:
        RequestError: the checkpoint cannot do what is asked.
    """

    def __init__(
        self,
        recording: Recording,
        vocabulary: SpeechVocabulary,
        tokenizer: TextTokenizer,
        options: TranscriptionOptions,
    ) -> None:
        self._recording, self._vocabulary, self._options = recording, vocabulary, options
        self._tokenizer = tokenizer
        self.language = vocabulary.check(options)
        """Code of what is spoken; None until it was heard."""
        self.language_probability = 1.0
        if options.word_timestamps and not vocabulary.alignment_heads:
            raise RequestError(
                "this checkpoint does not say which heads follow the words (alignment_heads, generation_config.json): "
                "leave word_timestamps out",
                param="word_timestamps",
                code="unsupported",
            )
        self._most_prompt = vocabulary.max_tokens // 2 - 1
        self._hotwords = self._text_ids(options.hotwords)[: self._most_prompt]
        self._history = self._text_ids(options.prompt)
        """Tokens that the next window reads."""
        self._words = WordTimes(tokenizer.decode, vocabulary.end_of_text, vocabulary.timestamp_begin)

    def run(self) -> Steps:
        """The steps, and the transcription as their value."""
        recording, segments, seek = self._recording, list[Segment](), 0
        while True:
            while not recording.has_window(seek):
                yield MoreSound()
            size = min(recording.num_frames, recording.num_known - seek)
            if size <= 0:
                break
            if recording.is_silent(seek):
                seek += size
                recording.forget(seek)
                continue
            features = recording.window(seek)
            if self.language is None:
                yield from self._hear_language(features)
            timed, seek = yield from self._window(features, seek, size)
            for each in timed:
                segment = self._segment(each, len(segments))
                segments.append(segment)
                yield segment
            recording.forget(seek)
        return Transcription(
            text="".join(segment.text for segment in segments).strip(),
            language=self.language or "en",
            language_probability=self.language_probability,
            duration_s=recording.duration_s,
            segments=tuple(segments),
        )

    def _hear_language(self, features: NDArray[np.float32]) -> Generator[Step, Any, None]:
        """Which language the first sound is in."""
        languages = self._vocabulary.languages
        prompt = (self._vocabulary.start_of_transcript,)
        logprobs: Mapping[int, float] = yield Probe(features, prompt, tuple(languages.values()))
        probabilities = {code: math.exp(logprobs[token]) for code, token in languages.items()}
        self.language = max(probabilities, key=lambda code: probabilities[code])
        self.language_probability = probabilities[self.language] / sum(probabilities.values())

    def _window(
        self, features: NDArray[np.float32], seek: int, size: int
    ) -> Generator[Step, Any, tuple[list[Timed], int]]:
        """What is said in a window, and the frame that the next one begins with."""
        vocabulary, options = self._vocabulary, self._options
        assert self.language is not None
        start, before = vocabulary.start(self.language, options), self._previous()
        probed = (*before, vocabulary.start_of_transcript)
        logprobs: Mapping[int, float] = yield Probe(features, probed, (vocabulary.no_speech,))
        no_speech_prob = math.exp(logprobs[vocabulary.no_speech])
        is_last = self._recording.is_finished and seek + size >= self._recording.num_known
        best = yield from self._decode(features, (*before, *start), no_speech_prob, is_last=is_last)
        if self._is_silence(no_speech_prob, best.avg_logprob):
            return [], seek + size
        pieces, used = split_window(
            best.decoded.token_ids, size, vocabulary.timestamp_begin, has_times=options.timestamps
        )
        timed = [
            Timed(
                seek_s=seek / FRAMES_PER_S,
                start_s=seek / FRAMES_PER_S + piece.start_s,
                end_s=seek / FRAMES_PER_S + piece.end_s,
                token_ids=piece.token_ids,
                temperature=best.temperature,
                avg_logprob=best.avg_logprob,
                compression_ratio=best.compression_ratio,
                no_speech_prob=no_speech_prob,
                logprobs=self._logprobs(best.decoded, piece),
            )
            for piece in pieces
        ]
        following = seek + used.num_frames
        if options.word_timestamps:
            timed = yield from self._add_words(timed, features, size)
            end_s = self._words.last_end_s(timed)
            if not used.ends_in_silence and end_s is not None and end_s > seek / FRAMES_PER_S:
                following = round(end_s * FRAMES_PER_S)
        kept = [each for each in timed if each.start_s != each.end_s and self._text(each.token_ids).strip()]
        is_reset = not options.condition_on_previous_text or best.temperature > options.prompt_reset_on_temperature
        self._history = [] if is_reset else [*self._history, *(token for each in kept for token in each.token_ids)]
        return kept, following

    def _decode(
        self, features: NDArray[np.float32], prompt: tuple[int, ...], no_speech_prob: float, *, is_last: bool
    ) -> Generator[Step, Any, _Attempt]:
        """The window at the first temperature whose text is neither repetitive nor improbable."""
        options, room = self._options, self._vocabulary.max_tokens - len(prompt)
        max_tokens = room if options.max_tokens is None else min(room, options.max_tokens)
        rules = self._vocabulary.rules(options, len(prompt))
        attempts: list[_Attempt] = []
        for temperature in options.temperatures:
            telling: Telling = "nothing"
            if not attempts and options.beam_size == 1 and self._is_heard(no_speech_prob):
                telling = "tokens" if is_last or not options.timestamps else "segments"
            decoded: Decoded = yield Decode(features, prompt, temperature, max_tokens, rules, options, telling)
            text = self._text(decoded.token_ids).strip()
            avg_logprob = decoded.sum_logprob / (len(decoded.token_ids) + 1)
            attempt = _Attempt(decoded, temperature, avg_logprob, compression_ratio(text))
            attempts.append(attempt)
            if self._is_improbable(attempt) and self._is_silence(no_speech_prob, avg_logprob):
                return attempt
            if not (self._is_repetitive(attempt) or self._is_improbable(attempt)):
                return attempt
        chosen = [each for each in attempts if not self._is_repetitive(each)] or attempts
        best = max(chosen, key=lambda each: each.avg_logprob)
        return _Attempt(best.decoded, attempts[-1].temperature, best.avg_logprob, best.compression_ratio)

    def _is_heard(self, no_speech_prob: float) -> bool:
        """Whether what is decoded counts, however probable it is."""
        bound = self._options.no_speech_threshold
        return bound is None or no_speech_prob <= bound

    def _is_repetitive(self, attempt: _Attempt) -> bool:
        bound = self._options.compression_ratio_threshold
        return bound is not None and attempt.compression_ratio > bound

    def _is_improbable(self, attempt: _Attempt) -> bool:
        bound = self._options.logprob_threshold
        return bound is not None and attempt.avg_logprob < bound

    def _is_silence(self, no_speech_prob: float, avg_logprob: float) -> bool:
        options = self._options
        if options.no_speech_threshold is None or no_speech_prob <= options.no_speech_threshold:
            return False
        return options.logprob_threshold is None or avg_logprob <= options.logprob_threshold

    def _add_words(
        self, timed: list[Timed], features: NDArray[np.float32], size: int
    ) -> Generator[Step, Any, list[Timed]]:
        """The segments of a window with their words."""
        vocabulary = self._vocabulary
        text_ids = tuple(token for each in timed for token in each.token_ids if token < vocabulary.end_of_text)
        if not text_ids:
            return timed
        assert self.language is not None
        start = (*vocabulary.start(self.language, self._options), vocabulary.no_timestamps)
        text_ids = text_ids[: vocabulary.max_tokens - len(start) - 1]
        alignment: Alignment = yield AlignTokens(features, start, text_ids, size)
        return self._words.add(timed, alignment, self.language)

    def _logprobs(self, decoded: Decoded, piece: Piece) -> tuple[TokenLogprob, ...] | None:
        """Of the text's tokens in a piece."""
        if decoded.logprobs is None:
            return None
        own = decoded.logprobs[piece.first : piece.first + len(piece.token_ids)]
        ids = zip(piece.token_ids, own, strict=True)
        return tuple(each for token, each in ids if token < self._vocabulary.end_of_text)

    def _previous(self) -> tuple[int, ...]:
        """What a window reads before its own transcript."""
        if self._vocabulary.start_of_previous is None or not (self._history or self._hotwords):
            return ()
        return (self._vocabulary.start_of_previous, *self._hotwords, *self._history[-self._most_prompt :])

    def _text_ids(self, text: str | None) -> list[int]:
        text = (text or "").strip()
        return self._tokenizer.encode(f" {text}", add_special_tokens=False) if text else []

    def _text(self, token_ids: Sequence[int]) -> str:
        return self._tokenizer.decode([token for token in token_ids if token < self._vocabulary.end_of_text])

    def _segment(self, timed: Timed, index: int) -> Segment:
        return Segment(
            index=index,
            seek_s=timed.seek_s,
            start_s=timed.start_s,
            end_s=timed.end_s,
            text=self._text(timed.token_ids),
            token_ids=timed.token_ids,
            temperature=timed.temperature,
            avg_logprob=timed.avg_logprob,
            compression_ratio=timed.compression_ratio,
            no_speech_prob=timed.no_speech_prob,
            words=timed.words if self._options.word_timestamps else None,
            logprobs=timed.logprobs,
        )

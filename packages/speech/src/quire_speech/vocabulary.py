"""The tokens of a checkpoint that are no text: languages, tasks, times."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from quire_interfaces import CheckpointError, RequestError
from quire_speech.languages import LANGUAGES, language_code
from quire_speech.options import TranscriptionOptions

__all__ = ["SECONDS_PER_TIMESTAMP", "SpeechVocabulary"]

SECONDS_PER_TIMESTAMP = 0.02
_MAX_INITIAL_TIMESTAMP = 50


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeechVocabulary:
    """Ids of tokens, and what generation_config.json says of them."""

    end_of_text: int
    start_of_transcript: int
    start_of_previous: int | None
    """Before the text of windows before; None where there is none, and prompts are not read."""
    no_speech: int
    no_timestamps: int
    languages: Mapping[str, int]
    """Code -> token; empty where English is all that the model knows."""
    tasks: Mapping[str, int]
    """"transcribe" and "translate" -> token; empty likewise."""
    suppressed: tuple[int, ...]
    """Tokens that are never written."""
    suppressed_at_begin: tuple[int, ...]
    """Tokens that no transcript begins with."""
    max_initial_timestamp: int
    """Largest time, in steps of 20 ms, that the checkpoint lets a window begin with."""
    alignment_heads: tuple[tuple[int, int], ...]
    """Layer and head of the cross attention that follows the words; empty where it is not known."""
    vocab_size: int
    max_tokens: int
    """Tokens of prompt and transcript together."""

    @property
    def timestamp_begin(self) -> int:
        """Token of the time 0."""
        return self.no_timestamps + 1

    @property
    def is_multilingual(self) -> bool:
        return bool(self.languages)

    @classmethod
    def read(
        cls, generation: Mapping[str, Any], find: Callable[[str], int | None], *, vocab_size: int, max_tokens: int
    ) -> SpeechVocabulary:
        """The tokens of a checkpoint.

        Args:
            generation: Its generation_config.json.
            find: A token's text -> its id, if it is in the vocabulary.
            vocab_size: Of the network.
            max_tokens: Longest sequence of the decoder.

        Raises:
            CheckpointError: a token is not there that no transcript can do without.
        """

        def token(text: str, name: str = "") -> int:
            found = generation.get(name) if name else None
            found = find(text) if found is None else found
            if not isinstance(found, int):
                raise CheckpointError(f"the tokenizer has no {text}; take the one of the checkpoint, whole")
            return found

        no_timestamps = token("<|notimestamps|>", "no_timestamps_token_id")
        of_config = generation.get("lang_to_id")
        languages = {code: find(f"<|{code}|>") for code in LANGUAGES}
        if isinstance(of_config, Mapping):
            languages = {str(text).strip("<|>"): int(number) for text, number in of_config.items()}
        elif vocab_size < _MULTILINGUAL_SIZE:
            languages = {}
        known = {code: number for code, number in languages.items() if number is not None}
        tasks = {task: find(f"<|{task}|>") for task in ("transcribe", "translate")} if known else {}
        no_speech = find("<|nospeech|>")
        start_of_previous = find("<|startofprev|>")
        initial = generation.get("max_initial_timestamp_index")
        return cls(
            end_of_text=token("<|endoftext|>"),
            start_of_transcript=token("<|startoftranscript|>", "decoder_start_token_id"),
            start_of_previous=start_of_previous,
            no_speech=no_timestamps - 1 if no_speech is None else no_speech,
            no_timestamps=no_timestamps,
            languages=known,
            tasks={task: number for task, number in tasks.items() if number is not None},
            suppressed=_ids(generation.get("suppress_tokens"), vocab_size),
            suppressed_at_begin=_ids(generation.get("begin_suppress_tokens"), vocab_size),
            max_initial_timestamp=initial if isinstance(initial, int) else _MAX_INITIAL_TIMESTAMP,
            alignment_heads=tuple((int(layer), int(head)) for layer, head in generation.get("alignment_heads") or ()),
            vocab_size=vocab_size,
            max_tokens=max_tokens,
        )

    def start(self, language: str, options: TranscriptionOptions) -> tuple[int, ...]:
        """What a transcript begins with."""
        begun = [self.start_of_transcript]
        if self.is_multilingual:
            begun += [self.languages[language], self.tasks[options.task]]
        return (*begun, *(() if options.timestamps else (self.no_timestamps,)))

    def check(self, options: TranscriptionOptions) -> str | None:
        """The code of the language that is asked for; None where it has to be heard.

        Raises:
            RequestError: the model does not know the language, or does not translate, or into English alone.
        """
        if options.task == "translate" and options.to_language != "en":
            raise RequestError(
                f"this model translates into English alone, got {options.to_language!r}",
                param="to_language",
                code="unsupported",
            )
        code = None if options.language is None else language_code(options.language)
        if not self.is_multilingual:
            if code not in (None, "en"):
                raise RequestError(
                    f"this model knows English only, got {options.language!r}", param="language", code="unsupported"
                )
            if options.task == "translate":
                raise RequestError(
                    "this model knows English only and does not translate; take a multilingual one",
                    param="task",
                    code="unsupported",
                )
            return "en"
        if options.task not in self.tasks:
            raise RequestError(f"this model does not {options.task}", param="task", code="unsupported")
        if code is not None and code not in self.languages:
            raise RequestError(
                f"this model does not know {LANGUAGES[code]} ({code}); it knows {', '.join(sorted(self.languages))}",
                param="language",
                code="unsupported",
            )
        return code

    def rules(self, options: TranscriptionOptions, begin: int) -> dict[str, Any]:
        """What a transcript may hold, as the sampler takes it (`extra_args.transcript_rules`).

        Args:
            begin: Tokens before the transcript.
        """
        listed = self.suppressed if options.suppress_tokens is None else options.suppress_tokens
        never = {self.start_of_transcript, self.no_speech, self.no_timestamps, *self.tasks.values()}
        never |= {self.start_of_previous} if self.start_of_previous is not None else set()
        most = round(options.max_initial_timestamp_s / SECONDS_PER_TIMESTAMP)
        return {
            "begin": begin,
            "end_of_text": self.end_of_text,
            "timestamp_begin": self.timestamp_begin,
            "timestamps": options.timestamps,
            "max_initial_timestamp": most,
            "suppressed": sorted(each for each in {*listed, *never} if each < self.vocab_size),
            "suppressed_at_begin": list(self.suppressed_at_begin) if options.suppress_blank else [],
        }


_MULTILINGUAL_SIZE = 51865
"""From so many tokens on, a vocabulary has languages."""


def _ids(value: Any, vocab_size: int) -> tuple[int, ...]:
    """A list of token ids of generation_config.json."""
    return tuple(each for each in value or () if isinstance(each, int) and 0 <= each < vocab_size)

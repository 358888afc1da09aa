"""Transcripts of models whose tokens come with the frames of the sound that they were heard in (Parakeet): texts of
chunks of speech with times of sentences and of words. Knows no engine.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quire.speech.questions import RATE, check_window, compression_ratio, is_unspaced
from quire.speech.sounds import extractor_settings, longest_sound_s
from quire_interfaces import PoolingParams, RequestError, Tokenizer
from quire_models.config import ModelConfig
from quire_speech import Segment, TokenLogprob, TranscriptionOptions, Word

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

__all__ = ["TRANSCRIBE", "FrameSpeech"]

TRANSCRIBE = PoolingParams(task="transcribe")
"""What a request for a chunk asks for."""
_WINDOW_S = 30.0
_SENTENCE_ENDS = tuple(".?!…。？！")
_BROKEN = "\N{REPLACEMENT CHARACTER}"
"""What a tokenizer writes for bytes that are no whole character."""
_PENALTIES = {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
"""Option of texts that are written token after token -> its value where it is left out."""


class FrameSpeech:
    """Chunks of speech as requests, and their answers as segments.

    Args:
        folder: Of the checkpoint, whose feature extractor says how far apart frames are.
        model: Its configuration.
        tokenizer: Its tokenizer.
        num_frames: Most frames of a request, as the engine says (`EngineInfo.max_encoder_len`).
    """

    def __init__(self, folder: Path, model: ModelConfig, tokenizer: Tokenizer, num_frames: int) -> None:
        hop = int(extractor_settings(folder).get("hop_length", 160))
        stride = math.prod(each.stride for each in model.network.sound_convolutions)
        self._frame_s = hop * stride / RATE
        self._tokenizer = tokenizer
        self.window_s = min(_WINDOW_S, longest_sound_s(folder, model, num_frames))
        """Longest chunk of a request."""

    def check(self, options: TranscriptionOptions, model: str) -> None:
        """Raises RequestError where options are for models of other kinds."""
        check_window(self.window_s, model)
        refused = {
            "task": (options.task != "transcribe", "does not translate"),
            "prompt": (bool(options.prompt), "reads nothing but sound; leave prompt out"),
            "hotwords": (bool(options.hotwords), "reads nothing but sound; leave hotwords out"),
            "n": (options.beam_size > 1, "takes the most probable tokens; leave beams out"),
            "temperature": (options.temperatures[0] > 0, "takes the most probable tokens; leave temperature out"),
        }
        for name, default in _PENALTIES.items():
            is_set = getattr(options, name) != default
            refused[name] = (is_set, f"tells tokens apart by the sound alone; leave {name} out")
        for param, (is_refused, reason) in refused.items():
            if is_refused:
                raise RequestError(f"{model} {reason}", param=param, code="unsupported")

    def prompt(self, samples: NDArray[np.float32]) -> dict[str, Any]:
        """A prompt that is a chunk, samples [S]."""
        return {"multi_modal_data": {"audio": (samples, RATE)}}

    def segments(
        self, start_s: float, num_samples: int, rows: Sequence[Sequence[float]], options: TranscriptionOptions
    ) -> list[Segment]:
        """A chunk as segments, one for each sentence: it ends with the word behind which a sentence ends.

        Args:
            start_s: Where it begins.
            num_samples: Its length.
            rows: Its tokens, as `quire_interfaces.PooledOutput` has them.
            options: How it was asked for; without `timestamps` it is one segment.
        """
        rows = rows[: options.max_tokens]
        token_ids = [int(row[0]) for row in rows]
        text = self._tokenizer.decode(token_ids)
        words = _words(self._pieces(token_ids))
        if not text.strip():
            return []
        joins = is_unspaced(options.language or "")
        sentences: list[list[tuple[str, list[int]]]] = [[]]
        for number, word in enumerate(words):
            sentences[-1].append(word)
            is_last = number == len(words) - 1
            if options.timestamps and not is_last and word[0].rstrip().endswith(_SENTENCE_ENDS):
                sentences.append([])
        window: dict[str, Any] = {
            "seek_s": start_s,
            "temperature": 0.0,
            "avg_logprob": sum(row[1] for row in rows) / len(rows),
            "compression_ratio": compression_ratio(text.strip()),
            "no_speech_prob": 0.0,
        }
        end_s = start_s + num_samples / RATE

        def told(word: tuple[str, list[int]]) -> Word:
            own = [rows[place] for place in word[1]]
            return Word(
                start_s=min(end_s, start_s + own[0][2] * self._frame_s),
                end_s=min(end_s, start_s + own[-1][3] * self._frame_s),
                text=word[0],
                probability=sum(math.exp(row[1]) for row in own) / len(own),
            )

        found: list[Segment] = []
        for index, sentence in enumerate(sentences):
            its_words, places = [told(word) for word in sentence], [place for _, own in sentence for place in own]
            written = "".join(word.text for word in its_words)
            space = "" if index or joins or written.startswith(" ") else " "
            found.append(
                Segment(
                    index=index,
                    start_s=its_words[0].start_s,
                    end_s=its_words[-1].end_s,
                    text=space + written,
                    token_ids=tuple(token_ids[place] for place in places),
                    words=tuple(its_words) if options.word_timestamps else None,
                    logprobs=self._logprobs(rows, places) if options.logprobs else None,
                    **window,
                )
            )
        return found

    def _pieces(self, token_ids: list[int]) -> list[str]:
        """What each token adds to the text; that of a character goes to the token that completes it."""
        pieces, told = list[str](), ""
        for count in range(1, len(token_ids) + 1):
            text = self._tokenizer.decode(token_ids[:count])
            is_whole = count == len(token_ids) or (text.startswith(told) and not text.endswith(_BROKEN))
            pieces.append(text[len(told) :] if is_whole else "")
            told = text if is_whole else told
        return pieces

    def _logprobs(self, rows: Sequence[Sequence[float]], places: Sequence[int]) -> tuple[TokenLogprob, ...]:
        tokenizer = self._tokenizer
        ids = [int(rows[place][0]) for place in places]
        return tuple(
            TokenLogprob(tokenizer.token_text(token), rows[place][1], tokenizer.token_bytes(token))
            for token, place in zip(ids, places, strict=True)
        )


def _words(pieces: Sequence[str]) -> list[tuple[str, list[int]]]:
    """Words of what tokens add to a text, and the tokens of each: a word begins with a space, and is more than that."""
    words: list[tuple[str, list[int]]] = []
    for place, piece in enumerate(pieces):
        if not words or (piece.startswith(" ") and words[-1][0].strip()):
            words.append((piece, [place]))
        else:
            words[-1] = (words[-1][0] + piece, [*words[-1][1], place])
    return words

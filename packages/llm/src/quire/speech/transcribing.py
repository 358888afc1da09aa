"""Recordings to text by an engine: what `quire_speech.Transcriber` asks becomes requests.

Knows both sides and no route. Each window is an ordinary request, so that those of all users share steps.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import quire_speech
from quire.media import HeldMedia, MediaFront
from quire_engine import (
    BeamSearchParams,
    CompletionOutput,
    Logprob,
    PooledRequestOutput,
    RequestOutput,
    alignment_params,
)
from quire_interfaces import (
    CheckpointError,
    PoolingParams,
    QuireError,
    RenderedPrompt,
    RequestError,
    SamplingParams,
    Tokenizer,
    read_json,
)
from quire_models.config import ModelConfig
from quire_speech import TokenLogprob, TranscriptionOptions

if TYPE_CHECKING:
    from quire_speech import (
        Alignment,
        AlignTokens,
        Decode,
        Decoded,
        PartialText,
        Probe,
        Recording,
        SpeechVocabulary,
        Transcriber,
    )

__all__ = ["SpeechFront", "WindowRequests", "speech_front", "token_logprobs"]

_logger = logging.getLogger(__name__)


class SpeechFront:
    """Transcribes with one model.

    Args:
        folder: Of the checkpoint.
        model: Its configuration.
        tokenizer: Its tokenizer.
        media: Keeps spectrograms.

    Raises:
        CheckpointError: tokens are not there that no transcript can do without.
    """

    def __init__(self, folder: Path, model: ModelConfig, tokenizer: Tokenizer, media: MediaFront) -> None:
        generation = folder / "generation_config.json"
        self._tokenizer, self._media = tokenizer, media
        self._num_mel_bins, self._num_frames = model.num_mel_bins, 2 * model.max_encoder_len
        self.vocabulary: SpeechVocabulary = quire_speech.SpeechVocabulary.read(
            read_json(generation) if generation.is_file() else {},
            self._find,
            vocab_size=model.vocab_size,
            max_tokens=model.max_model_len,
        )

    def _find(self, token: str) -> int | None:
        """Id of a token that is written so."""
        ids = self._tokenizer.encode(token, add_special_tokens=False)
        return ids[0] if len(ids) == 1 and self._tokenizer.id_to_token(ids[0]) == token else None

    def recording(self, samples: Any = None) -> Recording:
        """A whole recording, samples [S] of 16 kHz; None for one that samples are added to."""
        if samples is None:
            return quire_speech.Recording(self._num_mel_bins, self._num_frames)
        return quire_speech.Recording.of(samples, self._num_mel_bins, self._num_frames)

    def transcriber(self, recording: Recording, options: TranscriptionOptions, *, aligns_words: bool) -> Transcriber:
        """What asks for the windows of a recording.

        Args:
            recording: Whole, or to be added to.
            options: How.
            aligns_words: As the engine says (`EngineInfo`).

        Raises:
            RequestError: the model, or the engine, cannot do what is asked.
        """
        if options.word_timestamps and self.vocabulary.alignment_heads and not aligns_words:
            raise RequestError(
                "ranks that share a network tell no times of words, those of segments alone; leave word_timestamps out",
                param="word_timestamps",
                code="unsupported",
            )
        return quire_speech.Transcriber(recording, self.vocabulary, self._tokenizer, options)

    def requests(self) -> WindowRequests:
        """What makes requests of the steps of one recording."""
        return WindowRequests(self._media, self.vocabulary, self._tokenizer.decode)


class WindowRequests:
    """Requests of one recording, which holds the spectrogram of its present window until `release`."""

    def __init__(self, media: MediaFront, vocabulary: SpeechVocabulary, decode: Callable[[Sequence[int]], str]) -> None:
        self._media, self._vocabulary, self._decode = media, vocabulary, decode
        self._held: HeldMedia | None = None
        self._features: Any = None

    def prompt(self, features: Any, token_ids: tuple[int, ...]) -> RenderedPrompt:
        """A prompt whose window is heard by the encoder, and whose tokens are what the decoder begins with.

        Raises:
            OverloadedError: the shared memory is full of windows in use.
        """
        if features is not self._features:
            self.release()
            self._held, self._features = self._media.hold(features), features
        assert self._held is not None
        placed = self._held.place(())
        num_tokens = sum(span.item.num_embeds for span in placed.spans)
        return RenderedPrompt(token_ids=[0] * num_tokens, decoder_token_ids=list(token_ids), media=placed)

    def release(self) -> None:
        """The window was transcribed. Idempotent."""
        if self._held is not None:
            self._held.release()
        self._held = self._features = None

    def probe(self, step: Probe) -> SamplingParams:
        """What asks for the log probabilities of some tokens."""
        return SamplingParams(
            temperature=0.0,
            max_tokens=1,
            ignore_eos=True,
            logprob_token_ids=step.token_ids,
            detokenize=False,
        )

    def probed(self, output: RequestOutput) -> Mapping[int, float]:
        """The answer to it. Raises QuireError where there is none."""
        _, *named = _logprobs(output, 0)[0]
        return {each.token_id: each.logprob for each in named}

    def align(self, step: AlignTokens) -> tuple[RenderedPrompt, PoolingParams]:
        """What asks when the tokens of a text are said."""
        prompt = self.prompt(step.features, (*step.prompt, *step.text_ids, self._vocabulary.end_of_text))
        return prompt, alignment_params(len(step.prompt), max(1, step.num_frames // 2))

    def aligned(self, output: PooledRequestOutput) -> Alignment:
        """The answer to it. Raises QuireError where there is none."""
        if output.pooled is None:
            raise output.error or QuireError("the words of a window got no times")
        return quire_speech.align(output.pooled.data, output.pooled.shape)

    def decode(self, step: Decode) -> SamplingParams | BeamSearchParams:
        """What asks for a transcript."""
        options, extra = step.options, {"transcript_rules": step.rules}
        is_greedy = step.temperature == 0
        if is_greedy and options.beam_size > 1:
            return BeamSearchParams(
                beam_width=options.beam_size,
                max_tokens=step.max_tokens,
                length_penalty=1.0 if options.length_penalty is None else options.length_penalty,
                early_stopping=True,
                stop_token_ids=(self._vocabulary.end_of_text,),
                extra_args=extra,
            )
        return SamplingParams(
            n=1 if is_greedy else options.best_of,
            temperature=step.temperature,
            max_tokens=step.max_tokens,
            stop_token_ids=(self._vocabulary.end_of_text,),
            logprobs=0,
            seed=options.seed,
            top_p=options.top_p,
            top_k=options.top_k,
            min_p=options.min_p,
            repetition_penalty=options.repetition_penalty,
            presence_penalty=options.presence_penalty,
            frequency_penalty=options.frequency_penalty,
            extra_args=extra,
            detokenize=options.logprobs,
        )

    def decoded(self, step: Decode, output: RequestOutput) -> Decoded:
        """The best transcript of an answer. Raises QuireError where there is none."""
        penalty = 1.0 if step.options.length_penalty is None else step.options.length_penalty
        found: list[tuple[float, Decoded]] = []
        for completion in output.outputs:
            if completion.error is not None:
                raise QuireError(f"a window could not be transcribed: {completion.error}")
            token_ids = completion.token_ids
            if token_ids and token_ids[-1] == self._vocabulary.end_of_text:
                token_ids = token_ids[:-1]
            total = completion.cumulative_logprob or 0.0
            logprobs = token_logprobs(completion.logprobs) if step.options.logprobs else None
            decoded = quire_speech.Decoded(tuple(token_ids), total, logprobs and logprobs[: len(token_ids)])
            found.append((total / max(1, len(token_ids)) ** penalty, decoded))
        return max(found, key=lambda each: each[0])[1]

    def partial(self, step: Decode) -> PartialText:
        """What can be told of the answer to `decode` while it comes."""
        known = self._vocabulary
        return quire_speech.PartialText(
            self._decode, step.telling, step.options, known.end_of_text, known.timestamp_begin
        )

    def text_logprobs(self, completion: CompletionOutput) -> tuple[TokenLogprob, ...]:
        """Log probabilities of those of its tokens that are text."""
        pairs = zip(completion.token_ids, token_logprobs(completion.logprobs), strict=True)
        return tuple(each for token, each in pairs if token < self._vocabulary.end_of_text)


def token_logprobs(logprobs: Sequence[Sequence[Logprob]] | None) -> tuple[TokenLogprob, ...]:
    """Of the tokens that were chosen."""
    chosen = [each[0] for each in logprobs or ()]
    return tuple(TokenLogprob(each.decoded_token, each.logprob, each.token_bytes) for each in chosen)


def _logprobs(output: RequestOutput, index: int) -> Any:
    completion = output.outputs[index]
    if completion.error is not None or not completion.logprobs:
        raise QuireError(f"a window could not be transcribed: {completion.error}")
    return completion.logprobs


def speech_front(
    folder: Path, model: ModelConfig, tokenizer: Tokenizer, media: MediaFront | None
) -> SpeechFront | None:
    """What transcribes with a model; None for one that does not, or that lacks tokens, as the log says then."""
    return _front(folder, model, tokenizer, media) if model.num_mel_bins and media is not None else None


def _front(folder: Path, model: ModelConfig, tokenizer: Tokenizer, media: MediaFront) -> SpeechFront | None:
    try:
        return SpeechFront(folder, model, tokenizer, media)
    except CheckpointError as error:
        _logger.warning("recordings cannot be transcribed, prompts with sounds are answered: %s", error)
        return None

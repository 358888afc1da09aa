"""What `LLM` offers of speech: recordings to text.

Knows arguments and results; `quire_speech` knows windows, and `SharedEngine` runs them.
"""

from __future__ import annotations

import dataclasses
import io
import os
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import quire_multimodal
import quire_speech
from quire.lora_request import LoRAChoice
from quire.per_prompt import one_each
from quire.prompts import ParsedPrompt, naming_prompt
from quire.shared_engine import OfflineRequest, SharedEngine
from quire.speech.questions import RATE, SpeechQuestions
from quire.speech.sounds import longest_sound_s
from quire.speech.transcribing import SpeechFront, WindowRequests, speech_front
from quire_engine import BeamSearchParams, EngineInfo, RequestOutput
from quire_interfaces import PoolingParams, QuireError, RenderedPrompt, RequestError, RequestOptions, SamplingParams
from quire_speech import Segment, Transcription, TranscriptionOptions

if TYPE_CHECKING:
    from quire.media import MediaFront
    from quire.speech.frames import FrameSpeech
    from quire_models.config import ModelConfig
    from quire_renderers import ChatRenderer
    from quire_speech import Recording

__all__ = ["SpeechMethods"]

_NUM_THREADS = 64
"""Most recordings that one call transcribes at the same time."""


class SpeechMethods(ABC):
    """The methods of `LLM` that transcribe."""

    _shared: SharedEngine
    media: MediaFront | None
    model_config: ModelConfig
    model_folder: Path
    renderer: ChatRenderer

    @cached_property
    def _speech(self) -> SpeechFront | None:
        """None where the model does not transcribe."""
        return speech_front(self.model_folder, self.model_config, self.renderer.tokenizer, self.media)

    @property
    @abstractmethod
    def engine_info(self) -> EngineInfo:
        """What runs, and what was chosen."""

    @abstractmethod
    def _beam_search(
        self, parsed: list[ParsedPrompt], params: BeamSearchParams, lora_request: LoRAChoice | Sequence[LoRAChoice]
    ) -> list[Any]:
        """As `LLM.beam_search`, of prompts that were rendered."""

    @abstractmethod
    def chat(
        self,
        messages: Sequence[Sequence[dict[str, Any]]],
        sampling_params: SamplingParams,
        *,
        use_tqdm: bool,
        add_generation_prompt: bool,
        continue_final_message: bool,
        chat_template: str | None,
        chat_template_kwargs: dict[str, Any] | None,
    ) -> list[Any]:
        """As `LLM.chat`."""

    @abstractmethod
    def generate(self, prompts: Any, sampling_params: SamplingParams, *, use_tqdm: bool) -> list[Any]:
        """As `LLM.generate`."""

    @abstractmethod
    def encode(self, prompts: Any, pooling_params: PoolingParams, *, use_tqdm: bool) -> list[Any]:
        """As `LLM.encode`."""

    @cached_property
    def _frames(self) -> FrameSpeech | None:
        """What makes transcripts of tokens that come with their frames; None for other models."""
        info = self.engine_info
        if "transcribe" not in info.pooling_tasks:
            return None
        from quire.speech.frames import FrameSpeech  # of use to few models

        return FrameSpeech(self.model_folder, self.model_config, self.renderer.tokenizer, info.max_encoder_len)

    @cached_property
    def _hears(self) -> bool:
        """Whether the model is asked about sounds, chunk by chunk."""
        is_decoder = self.engine_info.runner == "generate" and not self.model_config.num_mel_bins
        return is_decoder and self.media is not None and "audio" in self.media.placeholders

    def transcribe(
        self,
        recordings: Any,
        options: TranscriptionOptions | Sequence[TranscriptionOptions] | None = None,
        *,
        max_concurrency: int | None = None,
    ) -> list[Transcription]:
        """Transcribe recordings; the windows of all of them share steps.

        Args:
            recordings: One, or a list of them: the path of a file, its bytes, an open binary file, samples (floats of
                one channel, -1 to 1, 16,000 a second) as an array, or a pair of such an array and its rate.
            options: One for all, or one each; None for the defaults.
            max_concurrency: Most recordings at a time; None for as many as the engine runs sequences.

        Returns:
            One transcription per recording, in order.

        Raises:
            RequestError: a recording cannot be read, or an option is not for this model; the message says which one.
        """
        if self._speech is None and self._frames is None and not self._hears:
            raise RequestError(
                f"{self.engine_info.model} transcribes nothing; take a Whisper", param="model", code="unsupported"
            )
        many = recordings if isinstance(recordings, list) else [recordings]
        given: TranscriptionOptions | Sequence[TranscriptionOptions] = options or TranscriptionOptions()
        each_options: list[TranscriptionOptions] = one_each("options", given, len(many), TranscriptionOptions)
        if self._speech is None:
            how = self._transcribe_by_questions if self._frames is None else self._transcribe_by_frames
            return [how(i, each, each_options[i], len(many)) for i, each in enumerate(many)]
        for index, each in enumerate(each_options):
            with naming_prompt(index, len(many), "recordings"):
                self._transcriber(self._speech.recording(), each)  # which refuses what it cannot do
        bound = max_concurrency or self.engine_info.max_num_seqs
        if len(many) <= 1 or bound == 1:
            return [self._transcribe(i, each, each_options[i], len(many)) for i, each in enumerate(many)]
        with ThreadPoolExecutor(min(bound, len(many), _NUM_THREADS), thread_name_prefix="transcribe") as pool:
            futures = [
                pool.submit(self._transcribe, i, each, each_options[i], len(many)) for i, each in enumerate(many)
            ]
            try:
                return [future.result() for future in futures]
            except BaseException:
                for future in futures:
                    future.cancel()
                raise

    def _transcribe(self, index: int, source: Any, options: TranscriptionOptions, count: int) -> Transcription:
        """One of `count` recordings."""
        assert self._speech is not None
        with naming_prompt(index, count, "recordings"):
            recording, blocks = self._opened(source)
            requests = self._speech.requests()
            steps, answer = self._transcriber(recording, options).run(), None
            try:
                while True:
                    step = steps.send(answer)
                    answer = None
                    if isinstance(step, quire_speech.MoreSound):
                        block = next(blocks, None)
                        recording.finish() if block is None else recording.add(block)
                    elif not isinstance(step, Segment):
                        answer = self._answer(step, requests)
            except StopIteration as end:
                transcription: Transcription = end.value
                return transcription
            finally:
                steps.close()
                requests.release()

    def _transcriber(self, recording: Recording, options: TranscriptionOptions) -> quire_speech.Transcriber:
        assert self._speech is not None
        return self._speech.transcriber(recording, options, aligns_words=self.engine_info.aligns_words)

    def _transcribe_by_questions(
        self, index: int, source: Any, options: TranscriptionOptions, count: int
    ) -> Transcription:
        """One of `count` recordings, each chunk of speech as a question."""
        longest_s = longest_sound_s(self.model_folder, self.model_config, self.engine_info.max_encoder_len)
        questions = SpeechQuestions(self.model_folder, self.renderer.tokenizer, longest_s)
        with naming_prompt(index, count, "recordings"):
            questions.check(options, self.engine_info.model)
            segments, language, num_samples = list[Segment](), options.language or "", 0
            for num_new, windows in self._speech_chunks(source, questions.window_s):
                num_samples += num_new
                asked = [questions.ask(each, options) for _, each in windows]
                if not asked:
                    continue
                prompts, params = [each.prompt for each in asked if each.prompt is not None], questions.params(options)
                if prompts:
                    outputs = self.generate(prompts, params, use_tqdm=False)
                else:
                    messages = [each.messages for each in asked]
                    outputs = self.chat(messages, params, use_tqdm=False, **asked[0].render_options)
                for (start_s, window), output in zip(windows, outputs, strict=True):
                    (completion,) = output.outputs
                    if completion.error is not None:
                        raise QuireError(f"a part of the recording failed in the engine: {completion.error}")
                    text, named = questions.read(completion.text)
                    language = language or named
                    token_ids, logprob = tuple(completion.token_ids), completion.cumulative_logprob or 0.0
                    made = (len(segments), start_s, len(window), text, token_ids, logprob, options, language)
                    segments.append(questions.segment(*made))
        return _transcription(segments, language, num_samples)

    def _transcribe_by_frames(
        self, index: int, source: Any, options: TranscriptionOptions, count: int
    ) -> Transcription:
        """One of `count` recordings, each chunk of speech as a pooled request."""
        from quire.speech.frames import TRANSCRIBE

        frames, segments, num_samples = self._frames, list[Segment](), 0
        assert frames is not None
        with naming_prompt(index, count, "recordings"):
            frames.check(options, self.engine_info.model)
            for num_new, windows in self._speech_chunks(source, frames.window_s):
                num_samples += num_new
                prompts = [frames.prompt(each) for _, each in windows]
                outputs = self.encode(prompts, TRANSCRIBE, use_tqdm=False) if prompts else []
                for (start_s, window), output in zip(windows, outputs, strict=True):
                    heard = frames.segments(start_s, len(window), output.outputs.tolist(), options)
                    segments += [dataclasses.replace(each, index=len(segments) + each.index) for each in heard]
        return _transcription(segments, options.language or "", num_samples)

    def _speech_chunks(self, source: Any, window_s: float) -> Iterator[tuple[int, list[tuple[float, Any]]]]:
        """Of each block of a recording, the number of its samples, and the chunks of speech that end in it: seconds
        where one begins, and its samples. Raises MediaError."""
        # Most models do not hear: numpy is loaded for those that do.
        from quire_speech.voice_activity import SpeechWindows

        cutter = SpeechWindows(window_s)
        samples, blocks = self._blocks(source)
        for block in blocks if samples is None else [samples]:
            yield len(block), cutter.feed(block)
        yield 0, cutter.finish()

    def _answer(self, step: Any, requests: WindowRequests) -> Any:
        if isinstance(step, quire_speech.AlignTokens):
            prompt, pooling = requests.align(step)
            (pooled,) = self._shared.run_pooling(
                [OfflineRequest(prompt=prompt, params=pooling, options=RequestOptions())], window=1
            )
            return requests.aligned(pooled)
        prompt = requests.prompt(step.features, step.prompt)
        if isinstance(step, quire_speech.Probe):
            return requests.probed(self._run_window(prompt, requests.probe(step)))
        params = requests.decode(step)
        if isinstance(params, BeamSearchParams):
            (found,) = self._beam_search([ParsedPrompt(prompt)], params, None)
            return requests.decoded(step, found)
        return requests.decoded(step, self._run_window(prompt, params))

    def _run_window(self, prompt: RenderedPrompt, params: SamplingParams) -> RequestOutput:
        (output,) = self._shared.run([OfflineRequest(prompt=prompt, params=params, options=RequestOptions())])
        return output

    def _opened(self, source: Any) -> tuple[Recording, Iterator[Any]]:
        """A recording, and the blocks that are still to come. Raises MediaError."""
        assert self._speech is not None
        samples, blocks = self._blocks(source)
        return self._speech.recording(samples), blocks

    def _blocks(self, source: Any) -> tuple[Any, Iterator[Any]]:
        """Samples of one channel, or None and blocks of them. Raises MediaError."""
        samples = _samples(source)
        if samples is not None:
            return samples, iter(())
        file, max_seconds = _file(source), quire_multimodal.MediaConfig().media_max_seconds
        if self.media is not None:
            max_seconds = self.media.preparer.config.media_max_seconds
        sound = quire_multimodal.SoundFile(file, max_seconds=max_seconds)
        return None, _blocks_of(sound, file)


def _transcription(segments: list[Segment], language: str, num_samples: int) -> Transcription:
    """All of a recording of so many samples."""
    return Transcription(
        text="".join(segment.text for segment in segments).strip(),
        language=language,
        language_probability=1.0,
        duration_s=num_samples / RATE,
        segments=tuple(segments),
    )


def _blocks_of(sound: Any, file: Any) -> Iterator[Any]:
    with file:
        yield from sound.blocks()


def _file(source: Any) -> Any:
    """An open file. Raises RequestError."""
    if isinstance(source, (str, os.PathLike)):
        try:
            return open(source, "rb")
        except OSError as error:
            raise RequestError(f"cannot read {os.fspath(source)}: {error.strerror}", param="recordings") from None
    if isinstance(source, (bytes, bytearray, memoryview)):
        return io.BytesIO(source)
    if hasattr(source, "read") and hasattr(source, "seek"):
        return source
    raise RequestError(
        f"a recording is a path, bytes, an open file, or samples, got {type(source).__name__}", param="recordings"
    )


def _samples(source: Any) -> Any:
    """Samples of one channel at 16 kHz where a recording is an array, maybe with its rate; None where it is a file.
    Raises RequestError."""
    value, rate = source if isinstance(source, tuple) and len(source) == 2 else (source, quire_speech.SAMPLES_PER_S)
    if not hasattr(value, "__array__"):
        return None
    return quire_multimodal.mono_samples(value, rate, quire_speech.SAMPLES_PER_S)

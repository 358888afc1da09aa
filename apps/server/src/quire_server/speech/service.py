"""OpenAI's routes of speech: a form with a recording in, its text out, whole or as it is heard.

The file goes to disk as it arrives, and from there block by block through a decoding process to the model: little of a
recording is in memory at any time. A client that leaves ends all of it.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import tempfile
from collections.abc import AsyncGenerator
from typing import TYPE_CHECKING, Any, Literal

from starlette.requests import Request
from starlette.responses import Response

import quire_multimodal  # its names are loaded when they are used
from quire.async_llm import AsyncLLM
from quire.speech.transcribers import Hearing, TextDelta, Transcriber, segments_of, transcription_of
from quire_engine import EngineInfo
from quire_interfaces import OutputKind, OverloadedError, RequestError
from quire_multimodal import MediaError
from quire_server.config import ServerConfig
from quire_server.context import ServerContext, unless_disconnected
from quire_server.errors import HTTPError
from quire_server.files.upload import UploadLimits, read_form
from quire_server.request_ids import answer_id
from quire_server.responses import json_response
from quire_server.speech.answers import events, whole_answer
from quire_server.speech.diarizers import Diarizer, diarized_transcript, load_diarizer
from quire_server.speech.live_pace import LivePace
from quire_server.speech.request import SpeechRequest, VoiceFields, read_fields
from quire_server.streaming import EventStream
from quire_speech import Segment, Transcription

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

__all__ = ["SpeechService", "hears_only", "served_tasks", "speak"]

MAX_FIELD_BYTES = 1 << 14
MAX_OPEN = 64
"""Recordings that are decoded at a time."""
SHORT_S = 60.0
"""A recording up to here is decoded at once, which gives the process free for the next one."""
_logger = logging.getLogger(__name__)
Task = Literal["transcribe", "translate"]


def hears_only(info: EngineInfo) -> bool:
    """Whether a model reads sound and no text, as Whisper does."""
    return bool(info.max_encoder_len) and "audio" in info.modalities


def served_tasks(llm: AsyncLLM) -> list[str]:
    """What the model does: "generate" for texts, "transcription" and "translation" for recordings; embeddings and the
    like are told elsewhere."""
    info, transcriber = llm.engine.info, llm.transcriber
    tasks = ["generate"] if info.runner == "generate" and not hears_only(info) else []
    if transcriber is not None:
        tasks += ["transcription", "translation"] if transcriber.can_translate else ["transcription"]
    return tasks


class SpeechService:
    """The routes.

    Args:
        config: Bounds of files.
    """

    def __init__(self, config: ServerConfig) -> None:
        self._limits = UploadLimits(
            max_bytes=config.audio_max_bytes,
            timeout_s=config.body_timeout_s,
            max_field_bytes=MAX_FIELD_BYTES,
            flag="--audio-max-bytes",
        )
        self._max_seconds = config.audio_max_seconds
        self._diarizer_name = config.diarizer_plugin
        self._diarizer: Diarizer | None = None
        self._pool: quire_multimodal.SoundPool | None = None
        self._num_open = 0
        self.pace = LivePace()
        """Of live sound."""

    async def transcriptions(self, context: ServerContext, request: Request) -> Response:
        """POST /v1/audio/transcriptions: what is said in a recording."""
        return await self._answer(context, request, "transcribe")

    async def translations(self, context: ServerContext, request: Request) -> Response:
        """POST /v1/audio/translations: what is said in a recording, in English."""
        return await self._answer(context, request, "translate")

    async def close_at_end(self) -> None:
        """Runs beside the requests, and ends the decoding processes with them."""
        try:
            await asyncio.Event().wait()
        finally:
            if self._pool is not None:
                self._pool.close()

    def transcriber(self, context: ServerContext) -> Transcriber:
        """What transcribes with the served model.

        Raises:
            RequestError: it hears nothing.
        """
        transcriber = context.llm.transcriber
        if transcriber is None:
            takes = () if context.llm.media is None else context.llm.media.placeholders
            raise RequestError(
                f"{context.llm.engine.info.model} is no speech model, it takes {', '.join(('text', *takes))}; "
                "serve Whisper or a model that hears (docs/speech.md)",
                param="model",
                code="unsupported_task",
            )
        return transcriber

    async def _answer(self, context: ServerContext, request: Request, task: Task) -> Response:
        transcriber = self.transcriber(context)
        async with contextlib.AsyncExitStack() as stack:
            file = stack.enter_context(tempfile.TemporaryFile())  # noqa: SIM115  (a stream may need it longer)

            def write(data: bytes) -> None:
                file.write(data)

            try:
                form = await read_form(request, self._limits, write)
                await asyncio.to_thread(file.flush)
            except OSError as error:
                _logger.error("a recording cannot be stored: %s", error)
                raise HTTPError(503, "the recording cannot be stored, the server's log says why") from None
            body = read_fields(form.values)
            model = context.resolve_model(body.model)
            _check(transcriber, body, task)
            diarizer = self._diarizer_of(body)
            options = body.options(task)
            if form.filename is None:
                raise RequestError("file is required", param="file")
            context.check_priority(body.priority)
            sound = stack.enter_context(await self._opened(file.fileno()))
            request_options = dataclasses.replace(context.request_options(body), output_kind=OutputKind.FINAL_ONLY)
            hearing = Hearing(wants_deltas=bool(body.stream) and body.response_format in ("json", "text"))
            recording = Recording(sound, body.voice(), keeps_samples=diarizer is not None)
            segments = recording.segments(transcriber.transcribe(recording.blocks(), options, request_options, hearing))
            if not body.stream:
                heard = await unless_disconnected(request, _all(segments))
                if diarizer is not None:
                    transcription = transcription_of(heard, hearing, recording.duration_s)
                    return json_response(await _diarized(diarizer, recording, transcription, body.known_speaker_names))
                return whole_answer(body, task, heard, hearing, recording.duration_s)
            name = answer_id(request, "trsc-" if task == "transcribe" else "trsl-", body.request_id)
            stream = _closing(events(segments, body, task, name, model, hearing, sound.duration_s), stack.pop_all())
            return await EventStream.begin(stream)

    def _diarizer_of(self, body: SpeechRequest) -> Diarizer | None:
        """What tells the speakers of a request apart; None where it does not ask for that.

        Raises:
            RequestError: there is nothing that does, or it is asked for something else.
        """
        if body.response_format != "diarized_json":
            return None
        if self._diarizer_name is None:
            raise RequestError(
                "this server tells no speakers apart: it was started without --diarizer-plugin; take response_format "
                "verbose_json",
                param="response_format",
                code="unsupported",
            )
        if body.stream:
            raise RequestError("diarized_json is answered whole; leave stream out", param="stream")
        if body.known_speaker_references:
            raise RequestError(
                "speakers are known by name only; leave known_speaker_references out", param="known_speaker_references"
            )
        if self._diarizer is None:
            self._diarizer = load_diarizer(self._diarizer_name)
        return self._diarizer

    async def _opened(self, file: int) -> _Sound:
        if self._num_open >= MAX_OPEN:
            raise OverloadedError(f"{MAX_OPEN} recordings are being transcribed; try again later", retry_after_s=5.0)
        if self._pool is None:
            self._pool = quire_multimodal.SoundPool(max_idle=2)
        self._num_open += 1
        try:
            opened = await asyncio.to_thread(self._pool.open, file, max_seconds=self._max_seconds)
            return await _Sound(self, opened).read_if_short()
        except MediaError as error:
            self._num_open -= 1
            raise error.at("file") from None
        except BaseException:
            self._num_open -= 1
            raise

    def closed(self) -> None:
        """A recording is done with."""
        self._num_open -= 1


class _Sound:
    """A recording that is decoded as it is read, or was decoded whole where it is short."""

    def __init__(self, service: SpeechService, opened: quire_multimodal.OpenSound) -> None:
        self._service, self._opened = service, opened
        self._blocks: list[NDArray[np.float32]] | None = None

    @property
    def duration_s(self) -> float:
        """As its packets say."""
        return self._opened.duration_s

    async def read_if_short(self) -> _Sound:
        if self._opened.duration_s <= SHORT_S:
            try:
                self._blocks = [block async for block in self._opened]
            finally:
                self._opened.close()
        return self

    async def blocks(self) -> AsyncGenerator[NDArray[np.float32], None]:
        try:
            if self._blocks is not None:
                for block in self._blocks:
                    yield block
                return
            async for block in self._opened:
                yield block
        except MediaError as error:
            raise error.at("file") from None

    def __enter__(self) -> _Sound:
        return self

    def __exit__(self, *_: object) -> None:
        self._opened.close()
        self._service.closed()


class Recording:
    """A recording on its way through the model: without its silence, where that is asked for.

    Args:
        sound: Where its samples come from.
        voice: What is speech; None to have the model hear all.
        keeps_samples: Keep all of it in memory, as `samples`.
    """

    def __init__(self, sound: _Sound, voice: VoiceFields | None, *, keeps_samples: bool = False) -> None:
        self._sound, self._filter = sound, None
        self.samples: list[NDArray[np.float32]] | None = [] if keeps_samples else None
        """What was read."""
        self._num_samples = 0
        if voice is not None:
            from quire_speech.voice_activity import SilenceFilter, VoiceSettings

            self._filter = SilenceFilter(VoiceSettings(**voice.settings()))

    @property
    def duration_s(self) -> float:
        """Length of what was read."""
        return self._num_samples / 16_000

    async def blocks(self) -> AsyncGenerator[NDArray[np.float32], None]:
        """What the model is to hear."""
        async for block in self._sound.blocks():
            self._num_samples += len(block)
            if self.samples is not None:
                self.samples.append(block)
            if self._filter is None:
                yield block
                continue
            for part in await asyncio.to_thread(self._filter.feed, block):
                yield part
        for part in () if self._filter is None else self._filter.finish():
            yield part

    async def segments(
        self, segments: AsyncGenerator[Segment | TextDelta, None]
    ) -> AsyncGenerator[Segment | TextDelta, None]:
        """The segments with their times in the recording."""
        async with contextlib.aclosing(segments):
            async for segment in segments:
                if self._filter is None or isinstance(segment, TextDelta):
                    yield segment
                else:
                    yield self._moved(segment, self._filter)

    @staticmethod
    def _moved(segment: Segment, kept: Any) -> Segment:
        words = segment.words
        if words is not None:
            words = tuple(
                dataclasses.replace(
                    each, start_s=kept.original_s(each.start_s), end_s=kept.original_s(each.end_s - 1e-3) + 1e-3
                )
                for each in words
            )
        return dataclasses.replace(
            segment,
            seek_s=kept.original_s(segment.seek_s),
            start_s=kept.original_s(segment.start_s),
            end_s=kept.original_s(segment.end_s - 1e-3) + 1e-3,
            words=words,
        )


def _check(transcriber: Transcriber, body: SpeechRequest, task: Task) -> None:
    if task == "translate" and not transcriber.can_translate:
        raise RequestError(
            "this model does not translate; use /v1/audio/transcriptions", param="model", code="unsupported"
        )


async def _diarized(
    diarizer: Diarizer, recording: Recording, transcription: Transcription, known_names: list[str]
) -> dict[str, Any]:
    def diarized() -> dict[str, Any]:
        import numpy as np

        blocks = recording.samples or [np.zeros(0, np.float32)]
        speakers = diarizer(np.concatenate(blocks), transcription.segments, known_names)
        return diarized_transcript(transcription, speakers)

    try:
        return await asyncio.to_thread(diarized)
    except Exception:
        _logger.exception("the diarizer plug-in failed")
        raise HTTPError(500, "the plug-in that tells speakers apart failed, the server's log says why") from None


async def _all(segments: AsyncGenerator[Segment | TextDelta, None]) -> list[Segment]:
    return [each async for each in segments_of(segments)]


async def _closing(
    stream: AsyncGenerator[bytes, None], stack: contextlib.AsyncExitStack
) -> AsyncGenerator[bytes, None]:
    async with stack, contextlib.aclosing(stream):
        async for event in stream:
            yield event


async def speak(context: ServerContext, request: Request) -> Response:
    """POST /v1/audio/speech: text to speech, which this server does not do."""
    raise RequestError(
        "this server writes what it hears and speaks nothing; text to speech needs a program for it, such as Kokoro, "
        "Piper or speaches, which serve this route",
        param=None,
        code="unsupported_task",
    )

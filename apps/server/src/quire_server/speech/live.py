"""Transcription of live sound over a websocket, `/v1/realtime`: OpenAI's transcription sessions, and vLLM's events.

Sound comes in `input_audio_buffer.append`, turns end where nobody speaks or where the client says so, and their texts
go out as they become certain. Turns of all sessions are ordinary requests, so that sessions share batches. Source of
the shapes: OpenAI's public API reference, and vLLM's documentation of its realtime API.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import contextlib
import dataclasses
import logging
import secrets
import time
from typing import TYPE_CHECKING, Any

import msgspec
from starlette.websockets import WebSocket, WebSocketDisconnect

from quire.speech.transcribers import Transcriber
from quire_interfaces import OutputKind, QuireError, RequestError, RequestOptions
from quire_observability import current_request_id
from quire_server.context import ServerContext
from quire_server.errors import error_body
from quire_server.readiness import refuse_while_draining
from quire_server.speech.live_items import RATE, LiveTurn
from quire_server.speech.live_pace import LivePace
from quire_server.speech.live_session import LiveSettings
from quire_server.speech.service import SpeechService

if TYPE_CHECKING:
    from quire_speech.live_sound import LiveSound
    from quire_speech.voice_activity import TurnDetector

__all__ = ["live_socket"]

MAX_TURN_S = 600.0
"""Longest turn: a client that ends none would fill the memory."""
MAX_VOICED_TURN_S = 60.0
"""The voice detector ends a turn here at the latest."""
MIN_TURN_S = 0.1
MAX_TURNS = 8
"""Turns of one session that are transcribed at a time; its sound is not read while there are more."""
DRAIN_LOOK_S = 0.2
HUSH_S = 0.1
"""After so much silence no transcript of a running turn begins."""
_logger = logging.getLogger(__name__)
_encoder = msgspec.json.Encoder()


async def live_socket(service: SpeechService, context: ServerContext, socket: WebSocket) -> None:
    """Serve one connection until the client or the server leaves."""
    await socket.accept("realtime" if "realtime" in socket.scope["subprotocols"] else None)
    try:
        refuse_while_draining(context)
        context.check_awake()
        model = socket.query_params.get("model")
        session = LiveConnection(context, socket, service.transcriber(context), service.pace)
        if model is not None:
            session.check_model(model)
        if (update := getattr(socket.state, "realtime_update", None)) is not None:
            session.begin_with(update)
    except QuireError as error:
        with contextlib.suppress(RuntimeError, WebSocketDisconnect):
            await socket.send_text(
                _encoder.encode({"type": "error", "event_id": _event_id(), **error_body(error)}).decode()
            )
            await socket.close(1008, str(error)[:120])
        return
    try:
        await session.run()
    except WebSocketDisconnect:
        pass
    except Exception:
        _logger.exception("a realtime session failed")
        with contextlib.suppress(RuntimeError, WebSocketDisconnect):
            await socket.close(1011)
    finally:
        await session.close()


def _event_id() -> str:
    return f"event_{secrets.token_hex(12)}"


# Many attributes: the state of one session; each event reads some of it.
class LiveConnection:
    """One session.

    Args:
        context: Of the server, for its caller.
        socket: Accepted.
        transcriber: Of the served model.
        pace: Of the server.
    """

    def __init__(self, context: ServerContext, socket: WebSocket, transcriber: Transcriber, pace: LivePace) -> None:
        self._pace = pace
        self._context, self._socket, self._transcriber = context, socket, transcriber
        self.id = f"sess_{secrets.token_hex(12)}"
        self._settings = LiveSettings()
        self._line: LiveSound | None = None
        self._turns: TurnDetector | None = None
        self._turns_start_s = 0.0
        """Where in the session the detector began."""
        self._buffer: list[Any] = []
        """Blocks of sound that belong to no turn yet: all since the last one, or with a detector the latest."""
        self._buffer_start = self._num_samples = 0
        """Samples of the session before the buffer, and so far."""
        self._turn: LiveTurn | None = None
        self._last_item_id: str | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._free = asyncio.Semaphore(MAX_TURNS)
        self._sending = asyncio.Lock()

    async def run(self) -> None:
        """Read events until the client leaves."""
        created = {"session": self._settings.object(self.id), "id": self.id, "created": int(time.time())}
        await self._send("session.created", **created)
        while True:
            text = await self._received()
            if text is None:
                await self._socket.close(1012, "the server is shutting down")
                return
            event: Any = None
            try:
                event = _parsed(text, self._context.config.max_body_bytes)
                await self._take(event)
            except QuireError as error:
                await self._send_error(error, event.get("event_id") if isinstance(event, dict) else None)

    async def _received(self) -> str | None:
        """The next message; None where the server drains."""
        receiving = asyncio.ensure_future(self._socket.receive_text())
        try:
            while not receiving.done():
                await asyncio.wait((receiving,), timeout=DRAIN_LOOK_S)
                if self._context.state.is_draining and not receiving.done() and not self._tasks:
                    return None
            return receiving.result()
        finally:
            receiving.cancel()

    async def close(self) -> None:
        """The client is gone: end what runs for it."""
        if self._turn is not None:
            self._turn.drop()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _take(self, event: dict[str, Any]) -> None:
        kind = event["type"]
        if kind in ("session.update", "transcription_session.update"):
            await self._update(event)
        elif kind == "input_audio_buffer.append":
            await self._append(event.get("audio"))
        elif kind == "input_audio_buffer.commit":
            await self._commit(event)
        elif kind == "input_audio_buffer.clear":
            self._drop()
            await self._send("input_audio_buffer.cleared")
        else:
            raise RequestError(
                f"type must be session.update, input_audio_buffer.append, .commit or .clear, got {kind!r:.100}; this "
                "server transcribes and does not converse",
                param="type",
                code="unsupported_event",
            )

    def begin_with(self, update: dict[str, Any]) -> None:
        """Begin with the settings of an event. Raises RequestError."""
        self._settings = self._settings.updated(update)

    def check_model(self, name: str) -> None:
        """Raises ModelNotFoundError where it is not served."""
        self._context.resolve_model(name)

    async def _update(self, event: dict[str, Any]) -> None:
        settings = self._settings.updated(event)
        if settings.transcription.model is not None:
            self.check_model(settings.transcription.model)
        if (settings.form, settings.rate) != (self._settings.form, self._settings.rate):
            self._line = None
            _line_of(settings)
        if settings.turn_detection != self._settings.turn_detection:
            _detector_of(settings)
            self._turns = None
        self._settings = settings
        if event["type"] == "transcription_session.update":
            await self._send("transcription_session.updated", session=settings.beta_object(self.id))
        elif not settings.is_vllm:
            await self._send("session.updated", session=settings.object(self.id))

    async def _append(self, audio: Any) -> None:
        try:
            data = base64.b64decode(audio, validate=True)
        except (TypeError, ValueError, binascii.Error):
            raise RequestError("audio must be sound in base64", param="audio", code="invalid_audio") from None
        if self._line is None:
            self._line = _line_of(self._settings)
        samples = await asyncio.to_thread(self._line.feed, data)
        self._buffer.append(samples)
        self._num_samples += len(samples)
        if self._turn is not None and self._turns is None:
            self._take_buffer(self._num_samples)
        if self._settings.turn_detection is not None:
            await self._detect(samples)
        elif (self._num_samples - self._buffer_start) > MAX_TURN_S * RATE or self._is_full():
            self._drop()
            raise RequestError(
                f"more than {MAX_TURN_S:g} s were not committed, and are dropped; send input_audio_buffer.commit where "
                "a turn ends",
                param="audio",
                code="input_audio_buffer_full",
            )

    def _is_full(self) -> bool:
        return self._turn is not None and self._turn.num_samples > MAX_TURN_S * RATE

    async def _detect(self, samples: Any) -> None:
        if self._turns is None:
            self._turns = _detector_of(self._settings)
            self._turns_start_s = (self._num_samples - len(samples)) / RATE
        assert self._turns is not None
        for kind, at_s in await asyncio.to_thread(self._turns.feed, samples):
            at_s += self._turns_start_s
            at = min(round(at_s * RATE), self._num_samples)
            if kind == "started":
                self._forget(at)
                self._turn = self._new_turn()
                await self._send(
                    "input_audio_buffer.speech_started", audio_start_ms=round(at_s * 1000), item_id=self._turn.id
                )
                self._turn.following = self._start(self._turn.follow())
            elif self._turn is not None:
                self._take_buffer(at)
                turn_id = self._turn.id
                await self._send("input_audio_buffer.speech_stopped", audio_end_ms=round(at_s * 1000), item_id=turn_id)
                await self._end_turn()
        if self._turn is not None:
            self._note_pause(self._turn, self._turns)
            # The end of a turn may turn out to have been before now, by what ends a turn of silence.
            kept = self._settings.turn_detection.silence_duration_ms if self._settings.turn_detection else 0
            self._take_buffer(self._num_samples - round(kept * RATE / 1000))
        else:
            self._forget(round((self._turns.quiet_until_s + self._turns_start_s) * RATE))

    def _note_pause(self, turn: LiveTurn, turns: TurnDetector) -> None:
        """Tell the turn whether somebody speaks."""
        pause_at_s = turns.pause_at_s
        if pause_at_s is not None:
            self._take_buffer(min(round((pause_at_s + self._turns_start_s) * RATE), self._num_samples))
            turn.pause()
        elif turns.silent_s >= HUSH_S:
            turn.hush()
        else:
            turn.resume()

    async def _commit(self, event: dict[str, Any]) -> None:
        if self._settings.is_vllm and not event.get("final"):
            if self._turn is None:
                self._turn = self._new_turn()
                self._take_buffer(self._num_samples)
                self._turn.following = self._start(self._turn.follow())
            return
        turn = self._turn or self._new_turn()
        if turn.num_samples + self._num_samples - self._buffer_start < MIN_TURN_S * RATE:
            length_ms = (turn.num_samples + self._num_samples - self._buffer_start) / RATE * 1000
            self._turn = None
            turn.drop()
            raise RequestError(
                f"the buffer holds {length_ms:.0f} ms of sound, and a turn takes {MIN_TURN_S * 1000:.0f} ms; append "
                "more before you commit",
                param=None,
                code="input_audio_buffer_commit_empty",
            )
        self._turn = turn
        self._take_buffer(self._num_samples)
        self._turns = None  # the next turn begins here
        await self._end_turn()

    async def _end_turn(self) -> None:
        """The turn is whole: tell so, and transcribe it."""
        turn, self._turn = self._turn, None
        assert turn is not None
        turn.end()
        before, self._last_item_id = self._last_item_id, turn.id
        if not self._settings.is_vllm:
            await self._send("input_audio_buffer.committed", previous_item_id=before, item_id=turn.id)
            content = [{"type": "input_audio", "transcript": None}]
            item = {"id": turn.id, "object": "realtime.item", "type": "message", "status": "completed", "role": "user"}
            await self._send("conversation.item.added", previous_item_id=before, item={**item, "content": content})
        await self._free.acquire()
        self._start(self._finish(turn, self._settings.is_vllm))

    async def _finish(self, turn: LiveTurn, is_vllm: bool) -> None:
        try:
            self._context.rate_limiter.admit(self._context.caller)
            text = await turn.finish()
        except QuireError as error:
            if is_vllm:
                await self._send_error(error, None)
            else:
                kind = "conversation.item.input_audio_transcription.failed"
                await self._send(kind, item_id=turn.id, content_index=0, error=error_body(error)["error"])
            return
        finally:
            self._free.release()
        if is_vllm:
            prompt, generated = turn.hearing.num_prompt_tokens, turn.hearing.num_generation_tokens
            usage = {"prompt_tokens": prompt, "completion_tokens": generated, "total_tokens": prompt + generated}
            await self._send("transcription.done", text=text, usage=usage)
            return
        await self._send(
            "conversation.item.input_audio_transcription.completed",
            item_id=turn.id,
            content_index=0,
            transcript=text,
            usage={"type": "duration", "seconds": round(turn.num_samples / RATE, 3)},
        )

    def _new_turn(self) -> LiveTurn:
        return LiveTurn(
            self._transcriber, self._settings.options(), self._request_options(), self._tell_delta, self._pace
        )

    def _request_options(self) -> RequestOptions:
        options = self._context.request_options(_Asked(model=self._settings.transcription.model))
        return dataclasses.replace(
            options, client_request_id=current_request_id.get() or None, output_kind=OutputKind.FINAL_ONLY
        )

    async def _tell_delta(self, turn: LiveTurn, text: str) -> None:
        if self._settings.is_vllm:
            await self._send("transcription.delta", delta=text)
            return
        kind = "conversation.item.input_audio_transcription.delta"
        await self._send(kind, item_id=turn.id, content_index=0, delta=text)

    def _take_buffer(self, until: int) -> None:
        """The sound up to here, counted from the session's beginning, belongs to the turn."""
        assert self._turn is not None
        while self._buffer and self._buffer_start < until:
            block = self._buffer.pop(0)
            taken = block[: until - self._buffer_start]
            if len(taken) < len(block):
                self._buffer.insert(0, block[len(taken) :])
            self._buffer_start += len(taken)
            self._turn.add(taken)

    def _forget(self, until: int) -> None:
        """The sound up to here belongs to no turn."""
        while self._buffer and self._buffer_start < until:
            block = self._buffer.pop(0)
            rest = block[until - self._buffer_start :]
            self._buffer_start += len(block) - len(rest)
            if len(rest):
                self._buffer.insert(0, rest)

    def _drop(self) -> None:
        self._forget(self._num_samples)
        if self._turn is not None:
            self._turn.drop()
        self._turn = self._turns = None

    def _start(self, work: Any) -> asyncio.Task[None]:
        task = asyncio.ensure_future(_logged(work))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def _send(self, kind: str, **fields: Any) -> None:
        event = {"type": kind, "event_id": _event_id(), **fields}
        async with self._sending:
            await self._socket.send_text(_encoder.encode(event).decode())

    async def _send_error(self, error: QuireError, event_id: Any) -> None:
        body = error_body(error)["error"]
        if self._settings.is_vllm:
            await self._send("error", error=body["message"], code=body["code"])
        else:
            await self._send("error", error={**body, "event_id": event_id if isinstance(event_id, str) else None})


@dataclasses.dataclass(slots=True)
class _Asked:
    """What a turn says of its request (`quire_server.context.RequestFields`)."""

    model: str | None
    priority: int = 0
    cache_salt: str | None = None
    stream: bool | None = False


async def _logged(work: Any) -> None:
    """Work beside the session; a client that is gone is no failure."""
    try:
        await work
    except (WebSocketDisconnect, RuntimeError):
        pass
    except QuireError as error:
        _logger.warning("a turn was not transcribed: %s", error)


def _line_of(settings: LiveSettings) -> LiveSound:
    from quire_speech.live_sound import LiveSound

    return LiveSound(settings.form, settings.rate)


def _detector_of(settings: LiveSettings) -> TurnDetector | None:
    """The detector of turns; None where the client says where they end. Raises RequestError."""
    given = settings.turn_detection
    if given is None:
        return None
    from quire_speech.voice_activity import TurnDetector, VoiceSettings

    return TurnDetector(
        VoiceSettings(
            threshold=given.threshold,
            prefix_padding_ms=given.prefix_padding_ms,
            silence_duration_ms=given.silence_duration_ms,
            max_speech_s=MAX_VOICED_TURN_S,
        )
    )


def _parsed(text: str, max_bytes: int) -> dict[str, Any]:
    if len(text) > max_bytes:
        raise RequestError(f"an event is larger than {max_bytes} bytes (--max-body-bytes)", param="body")
    try:
        event = msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError) as error:
        raise RequestError(f"the event is not valid JSON: {error}", param="body", code="invalid_json") from None
    if not isinstance(event, dict) or not isinstance(event.get("type"), str):
        raise RequestError("an event must be a JSON object with a type", param="type", code="invalid_event")
    return event

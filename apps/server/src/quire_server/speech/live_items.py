"""A turn of a realtime session: its sound while it grows, and its text as far as that is certain.

While somebody speaks, all that was said so far is transcribed again and again; words on which two transcripts in a row
agree are certain (local agreement, Liu et al. 2020, arXiv 2005.11185). A turn that has ended is transcribed once more,
and what that says counts. That begins in the pause before: where nobody speaks for as long as belongs to a turn, its
sound is known before its end is.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import secrets
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import TYPE_CHECKING, Any

from quire.speech.transcribers import Hearing, Transcriber, segments_of, text_of_segments
from quire_interfaces import RequestOptions
from quire_server.speech.live_pace import LivePace
from quire_speech import Segment, TranscriptionOptions

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

__all__ = ["LiveTurn", "agreed_words"]

RATE = 16_000
PARTIAL_S = 1.0
"""So much new sound is worth another transcript of a running turn."""


def agreed_words(before: str, now: str) -> str:
    """The words with which both texts begin, as they stand in the second one."""
    old, new, end = before.split(), now.split(), 0
    count = next((place for place, (a, b) in enumerate(zip(old, new, strict=False)) if a != b), min(len(old), len(new)))
    for word in new[:count]:
        end = now.index(word, end) + len(word)
    return now[:end]


class _Transcript:
    """A transcript of the sound that a turn has had when it began."""

    def __init__(self, segments: AsyncGenerator[Segment, None], num_samples: int, pace: LivePace) -> None:
        self.num_samples = num_samples
        self._segments: list[Segment] = []
        self._has_more = asyncio.Event()
        self._task = asyncio.ensure_future(self._run(segments, pace))
        self._task.add_done_callback(self._told)

    async def _run(self, segments: AsyncGenerator[Segment, None], pace: LivePace) -> None:
        with pace.final():
            async with contextlib.aclosing(segments):
                async for segment in segments:
                    self._segments.append(segment)
                    self._has_more.set()

    def _told(self, task: asyncio.Task[None]) -> None:
        self._has_more.set()
        if not task.cancelled():
            task.exception()  # whoever reads gets it; where nobody does, it is about sound that did not count

    async def segments(self) -> AsyncGenerator[Segment, None]:
        """All of them, as they are heard. Raises what the transcriber raises."""
        num_told = 0
        while True:
            while num_told < len(self._segments):
                num_told += 1
                yield self._segments[num_told - 1]
            if self._task.done():
                await self._task
                if num_told == len(self._segments):
                    return
            else:
                self._has_more.clear()
                await self._has_more.wait()

    def cancel(self) -> None:
        """It does not count."""
        self._task.cancel()


# Many attributes: what was told, and the two kinds of transcripts of it that run.
class LiveTurn:
    """One turn.

    Args:
        transcriber: Of the served model.
        options: How.
        request_options: What else the engine is told.
        tell_delta: Sends new text.
        pace: Of the server.
    """

    def __init__(
        self,
        transcriber: Transcriber,
        options: TranscriptionOptions,
        request_options: RequestOptions,
        tell_delta: Callable[[LiveTurn, str], Awaitable[None]],
        pace: LivePace,
    ) -> None:
        self.id = f"item_{secrets.token_hex(12)}"
        self.hearing = Hearing()
        self._transcriber, self._options, self._request_options = transcriber, options, request_options
        self._tell_delta, self._pace = tell_delta, pace
        self._blocks: list[NDArray[np.float32]] = []
        self.num_samples = 0
        self._said = self._before = ""
        """What was told of its text, and the transcript before."""
        self.following: asyncio.Task[None] | None = None
        """Runs `follow`, and ends with the turn."""
        self._grown = asyncio.Event()
        self._partial: asyncio.Task[str] | None = None
        self._closing: _Transcript | None = None
        """Of all of the sound, where the turn may be over."""
        self._is_quiet = self._is_over = False

    def add(self, samples: NDArray[np.float32]) -> None:
        """More of its sound."""
        self._blocks.append(samples)
        self.num_samples += len(samples)
        self._grown.set()

    def hush(self) -> None:
        """Nobody speaks just now: another transcript would tell nothing new."""
        self._is_quiet = True

    def pause(self) -> None:
        """Nobody has spoken for so long that the turn, if it is over, has all of its sound."""
        self._is_quiet = True
        if self._closing is None and not self._is_over:
            self._stop_partial()
            self._closing = _Transcript(self._heard(self._options), self.num_samples, self._pace)

    def resume(self) -> None:
        """Somebody speaks: the turn is not over."""
        if self._is_quiet:
            self._is_quiet = False
            self._drop_closing()
            self._grown.set()

    def end(self) -> None:
        """There is no more."""
        self._is_over = True
        self._grown.set()
        if self.following is not None:
            self.following.cancel()
        self._stop_partial()

    def drop(self) -> None:
        """It ends, and nobody wants its text."""
        self.end()
        self._drop_closing()

    def _stop_partial(self) -> None:
        if self._partial is not None:
            self._partial.cancel()

    def _drop_closing(self) -> None:
        if self._closing is not None:
            self._closing.cancel()
            self._closing = None

    async def follow(self) -> None:
        """Tell what is certain while the turn grows, until it is over."""
        num_heard = 0
        while not self._is_over:
            if self._is_quiet or self.num_samples - num_heard < PARTIAL_S * RATE:
                self._grown.clear()
                await self._grown.wait()
                continue
            async with self._pace.partial():
                if self._is_quiet or self._is_over:
                    continue
                num_heard = self.num_samples
                self._partial = asyncio.ensure_future(self._text_so_far())
                await asyncio.wait((self._partial,))
            if self._partial.cancelled():
                continue
            now = self._partial.result()
            certain = agreed_words(self._before, now)
            self._before = now
            if not self._is_over and len(certain) > len(self._said) and certain.startswith(self._said):
                await asyncio.shield(self._tell(certain))  # what counts as told must be

    async def _text_so_far(self) -> str:
        options = dataclasses.replace(self._options, temperatures=(0.0,))
        async with contextlib.aclosing(self._heard(options)) as segments:
            return text_of_segments([each async for each in segments])

    async def finish(self) -> str:
        """The text of the turn, which is over; what is new in it is told."""
        closing = self._closing
        if closing is None or closing.num_samples != self.num_samples:
            self._drop_closing()
            closing = self._closing = _Transcript(self._heard(self._options), self.num_samples, self._pace)
        segments: list[Segment] = []
        try:
            async for segment in closing.segments():
                segments.append(segment)
                text = text_of_segments(segments)
                if text.startswith(self._said):
                    await self._tell(text)
        finally:
            closing.cancel()
        return text_of_segments(segments)

    async def _tell(self, text: str) -> None:
        new, self._said = text[len(self._said) :], text
        if new:
            await self._tell_delta(self, new)

    def _heard(self, options: TranscriptionOptions) -> AsyncGenerator[Segment, None]:
        blocks = list(self._blocks)

        async def sound() -> AsyncGenerator[Any, None]:
            for block in blocks:
                yield block

        self.hearing = Hearing()
        return segments_of(self._transcriber.transcribe(sound(), options, self._request_options, self.hearing))

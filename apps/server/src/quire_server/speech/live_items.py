"""A turn of a realtime session: its sound while it grows, and its text as far as that is certain.

While somebody speaks, all that was said so far is transcribed again and again; words on which two transcripts in a row
agree are certain (local agreement, Liu et al. 2020, arXiv 2005.11185). A turn that has ended is transcribed once more,
and what that says counts.
"""

from __future__ import annotations

import asyncio
import dataclasses
import secrets
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import TYPE_CHECKING, Any

from quire.transcribers import Hearing, Transcriber, text_of_segments
from quire_interfaces import RequestOptions
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


class LiveTurn:
    """One turn.

    Args:
        transcriber: Of the served model.
        options: How.
        request_options: What else the engine is told.
        tell_delta: Sends new text.
    """

    def __init__(
        self,
        transcriber: Transcriber,
        options: TranscriptionOptions,
        request_options: RequestOptions,
        tell_delta: Callable[[LiveTurn, str], Awaitable[None]],
    ) -> None:
        self.id = f"item_{secrets.token_hex(12)}"
        self.hearing = Hearing()
        self._transcriber, self._options, self._request_options = transcriber, options, request_options
        self._tell_delta = tell_delta
        self._pieces: list[NDArray[np.float32]] = []
        self.num_samples = 0
        self._said = self._before = ""
        """What was told of its text, and the transcript before."""
        self.following: asyncio.Task[None] | None = None
        """Runs `follow`, and ends with the turn."""
        self._grown = asyncio.Event()
        self._is_over = False

    def add(self, samples: NDArray[np.float32]) -> None:
        """More of its sound."""
        self._pieces.append(samples)
        self.num_samples += len(samples)
        self._grown.set()

    def end(self) -> None:
        """There is no more."""
        self._is_over = True
        self._grown.set()
        if self.following is not None:
            self.following.cancel()

    async def follow(self) -> None:
        """Tell what is certain while the turn grows, until it is over."""
        num_heard = 0
        options = dataclasses.replace(self._options, temperatures=(0.0,))
        while not self._is_over:
            if self.num_samples - num_heard < PARTIAL_S * RATE:
                self._grown.clear()
                await self._grown.wait()
                continue
            num_heard = self.num_samples
            now = text_of_segments([each async for each in self._heard(options)])
            certain = agreed_words(self._before, now)
            self._before = now
            if not self._is_over and len(certain) > len(self._said) and certain.startswith(self._said):
                await asyncio.shield(self._tell(certain))  # what counts as told must be

    async def finish(self) -> str:
        """The text of the turn, which is over; what is new in it is told."""
        segments: list[Segment] = []
        async for segment in self._heard(self._options):
            segments.append(segment)
            text = text_of_segments(segments)
            if text.startswith(self._said):
                await self._tell(text)
        return text_of_segments(segments)

    async def _tell(self, text: str) -> None:
        new, self._said = text[len(self._said) :], text
        if new:
            await self._tell_delta(self, new)

    def _heard(self, options: TranscriptionOptions) -> AsyncGenerator[Segment, None]:
        pieces = list(self._pieces)

        async def sound() -> AsyncGenerator[Any, None]:
            for piece in pieces:
                yield piece

        self.hearing = Hearing()
        return self._transcriber.transcribe(sound(), options, self._request_options, self.hearing)

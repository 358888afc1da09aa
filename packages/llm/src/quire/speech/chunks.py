"""Recordings as chunks of speech, several of which are heard at a time: found by the voice detector, so that silence
asks nothing."""

from __future__ import annotations

import asyncio
import dataclasses
from collections import deque
from collections.abc import AsyncGenerator, Callable, Coroutine
from typing import TYPE_CHECKING, Any

from quire_speech import Segment

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from quire.speech.transcribers import AudioBlocks

__all__ = ["segments_of_chunks"]

_MAX_AT_A_TIME = 4


async def segments_of_chunks(
    blocks: AudioBlocks,
    window_s: float,
    hear: Callable[[float, NDArray[np.float32]], Coroutine[Any, Any, list[Segment]]],
) -> AsyncGenerator[Segment, None]:
    """The segments of all chunks, in order and counted from 0. Closing it ends what is heard.

    Args:
        blocks: The recording.
        window_s: Longest chunk.
        hear: (where a chunk begins in seconds, samples [S]) -> its segments.
    """
    from quire_speech.voice_activity import SpeechWindows

    cutter, index = SpeechWindows(window_s), 0
    running: deque[asyncio.Task[list[Segment]]] = deque()

    def begin(windows: list[tuple[float, NDArray[np.float32]]]) -> None:
        running.extend(asyncio.ensure_future(hear(start_s, samples)) for start_s, samples in windows)

    async def first() -> list[Segment]:
        nonlocal index
        heard = [dataclasses.replace(each, index=index + place) for place, each in enumerate(await running.popleft())]
        index += len(heard)
        return heard

    try:
        async for block in blocks:
            begin(await asyncio.to_thread(cutter.feed, block))
            while running and (running[0].done() or len(running) >= _MAX_AT_A_TIME):
                for segment in await first():
                    yield segment
        begin(await asyncio.to_thread(cutter.finish))
        while running:
            for segment in await first():
                yield segment
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)

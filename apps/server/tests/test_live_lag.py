"""How long after somebody stopped speaking the text of a turn of live sound is there: hours of sessions on a clock that
jumps from one event to the next, with an engine that computes one step after the other.

The engine's steps take what those of tiny.en do on two cores: an encoder's pass 0.35 s, a token 15 ms.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncGenerator, Callable, Coroutine
from typing import Any

import numpy as np
import pytest

from quire.speech.transcribers import Hearing
from quire_interfaces import RequestOptions
from quire_server.speech.live_items import RATE, LiveTurn
from quire_server.speech.live_pace import LivePace
from quire_speech import Segment, TranscriptionOptions

ENCODE_S, TOKEN_S, TOKENS_PER_S = 0.35, 0.015, 4.0
PAUSE_S, SILENCE_S, TICK_S = 0.3, 0.5, 0.1
"""Silence after which a turn is transcribed and after which it ends, and the length of a block of sound."""


class JumpingLoop(asyncio.SelectorEventLoop):
    """Whose clock goes on where there is nothing to do."""

    now_s = 0.0
    _ready: Any
    _scheduled: Any

    def time(self) -> float:
        return self.now_s

    def _run_once(self) -> None:
        if not self._ready and self._scheduled:
            self.now_s = max(self.now_s, self._scheduled[0].when())
        super()._run_once()  # type: ignore[misc]  # asyncio's own step, which its types leave out


class OneStepAtATime:
    """Transcribes by steps, each of which waits for those that were asked for before; none can be interrupted."""

    can_translate, has_word_timestamps = False, False

    def __init__(self) -> None:
        self._steps = asyncio.Lock()
        self.busy_s = 0.0
        self.num_asked = 0

    async def _step(self, seconds: float) -> None:
        async def run() -> None:
            async with self._steps:
                self.busy_s += seconds
                await asyncio.sleep(seconds)

        async with self._steps:  # until it begins, it can be taken back
            pass
        await asyncio.shield(asyncio.ensure_future(run()))

    async def transcribe(
        self, blocks: Any, options: TranscriptionOptions, request_options: RequestOptions, hearing: Hearing
    ) -> AsyncGenerator[Segment, None]:
        self.num_asked += 1
        seconds = sum([len(block) async for block in blocks]) / RATE
        await self._step(ENCODE_S)
        for _ in range(int(seconds * TOKENS_PER_S)):
            await self._step(TOKEN_S)
        yield Segment(
            index=0, seek_s=0.0, start_s=0.0, end_s=seconds, text=" ".join(map(str, range(int(seconds)))), token_ids=(),
            temperature=0.0, avg_logprob=0.0, compression_ratio=1.0, no_speech_prob=0.0,
        )  # fmt: skip


async def session(
    engine: OneStepAtATime, pace: LivePace, turns: list[float], between_s: float, told: Callable[[float, float], None]
) -> int:
    """Speak turns of so many seconds, as `quire_server.speech.live` would hear them; the number of deltas."""
    loop, num_deltas, tasks = asyncio.get_running_loop(), 0, []
    silence = np.zeros(round(TICK_S * RATE), np.float32)

    async def delta(turn: LiveTurn, text: str) -> None:
        nonlocal num_deltas
        num_deltas += 1

    async def finished(turn: LiveTurn, ended_s: float, length_s: float) -> None:
        await turn.finish()
        told(loop.time() - ended_s, length_s)

    for length_s in turns:
        turn = LiveTurn(engine, TranscriptionOptions(), RequestOptions(), delta, pace)
        turn.following = asyncio.ensure_future(turn.follow())
        for tick in range(1, round((length_s + SILENCE_S) / TICK_S) + 1):
            await asyncio.sleep(TICK_S)
            quiet_s = tick * TICK_S - length_s
            if quiet_s < PAUSE_S + TICK_S / 2:
                turn.add(silence)
            if quiet_s > PAUSE_S - TICK_S / 2:
                turn.pause()
            elif quiet_s > TICK_S / 2:
                turn.hush()
            else:
                turn.resume()
        turn.end()
        ended_s = loop.time() - SILENCE_S
        tasks.append(asyncio.ensure_future(finished(turn, ended_s, length_s)))
        await asyncio.sleep(between_s)
    await asyncio.gather(*tasks)
    return num_deltas


def run(work: Callable[[], Coroutine[Any, Any, Any]]) -> Any:
    with asyncio.Runner(loop_factory=JumpingLoop) as runner:
        return runner.run(work())


def bound_s(length_s: float) -> float:
    return 0.3 + 0.3 * length_s


def test_lag_does_not_grow_in_half_an_hour() -> None:
    lags: list[tuple[float, float]] = []
    lengths = list(itertools.islice(itertools.cycle((2.0, 6.0, 12.0, 4.0, 20.0)), 180))
    assert sum(lengths) > 1500

    async def work() -> int:
        return await session(OneStepAtATime(), LivePace(), lengths, 1.0, lambda *each: lags.append(each))

    num_deltas = run(work)
    assert len(lags) == len(lengths)
    assert all(lag_s <= bound_s(length_s) for lag_s, length_s in lags)
    of_six = [lag_s for lag_s, length_s in lags if length_s == 6.0]
    assert max(of_six[-10:]) <= max(of_six[:10]) + 0.01
    assert num_deltas > 2 * len(lengths)  # words are told before turns end


def test_twenty_sessions_share_the_engine() -> None:
    """They say as much as it can hear; it hears turns that have ended, and others where it has time."""
    lags: list[tuple[float, float]] = []

    async def work() -> list[int]:
        engine, pace = OneStepAtATime(), LivePace()

        async def speaker(number: int) -> int:
            await asyncio.sleep(1.7 * number)
            return await session(engine, pace, [8.0] * 20, 22.0, lambda *each: lags.append(each))

        return await asyncio.gather(*map(speaker, range(20)))

    deltas = run(work)
    assert len(lags) == 400
    assert min(deltas) > 0
    late = [lag_s for lag_s, length_s in lags if lag_s > bound_s(length_s)]
    assert len(late) <= 40, sorted(late)
    assert max(late, default=0.0) < 6.0
    half = len(lags) // 2
    assert np.mean([lag for lag, _ in lags[half:]]) <= np.mean([lag for lag, _ in lags[:half]]) + 0.1


def test_running_turns_leave_half_of_the_time_to_others() -> None:
    engine_of: list[OneStepAtATime] = []

    async def work() -> int:
        engine_of.append(OneStepAtATime())
        return await session(engine_of[0], LivePace(), [60.0], 0.0, lambda *each: None)

    assert run(work) > 5
    assert engine_of[0].busy_s < 0.6 * 60 + ENCODE_S + 60 * TOKENS_PER_S * TOKEN_S


def test_who_goes_on_after_a_pause_is_not_cut_short() -> None:
    """The transcript that began in the pause is dropped, and the whole turn is told."""

    async def work() -> tuple[str, float]:
        engine, loop = OneStepAtATime(), asyncio.get_running_loop()

        async def delta(turn: LiveTurn, text: str) -> None:
            pass

        turn = LiveTurn(engine, TranscriptionOptions(), RequestOptions(), delta, LivePace())
        turn.add(np.zeros(3 * RATE, np.float32))
        turn.pause()
        await asyncio.sleep(0.1)
        turn.resume()
        turn.add(np.zeros(2 * RATE, np.float32))
        turn.pause()
        await asyncio.sleep(0.2)
        turn.end()
        begin_s = loop.time()
        return await turn.finish(), loop.time() - begin_s

    text, waited_s = run(work)
    assert text == "0 1 2 3 4"
    # The first pass was begun 0.3 s ago and runs on; of the second one's 0.35 + 20 * 0.015 s some may be done.
    assert waited_s == pytest.approx(2 * ENCODE_S + 20 * TOKEN_S - 0.3, abs=0.01)

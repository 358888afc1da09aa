"""How late a server of a Whisper tells live turns, in real time.

    python apps/bench/benchmarks/live_lag.py ws://127.0.0.1:8000/v1/realtime?intent=transcription SOUND --rounds 3

SOUND is a recording with pauses between its sentences; each client sends it again and again, a fifth of a second at a
time, with a second and a half of silence behind. Prints of each turn when its sound ended, how much later its text was
there, the bound of 0.3 s and 0.3 of the turn, and the text; and how many turns were later than it.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import contextlib
import json
import os
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np
import soundfile
import soxr
import websockets

RATE = 16_000
PIECE_S, PAUSE_S = 0.2, 1.5
PADDING_S = 0.3
"""`prefix_padding_ms` of the session: the server tells ends of turns with so much of the silence."""
SESSION = {
    "type": "transcription",
    "audio": {
        "input": {
            "format": {"type": "audio/pcm", "rate": RATE},
            "turn_detection": {"type": "server_vad", "prefix_padding_ms": round(1000 * PADDING_S)},
        }
    },
}


async def speak(url: str, client: int, data: bytes, rounds: int) -> list[tuple[float, float]]:
    """One client: lag and bound of each of its turns, in seconds."""
    found, starts, ends = list[tuple[float, float]](), dict[str, float](), dict[str, float]()
    async with websockets.connect(url, max_size=None) as socket:
        await socket.send(json.dumps({"type": "session.update", "session": SESSION}))
        begin = time.monotonic()

        async def listen() -> None:
            async for message in socket:
                event: dict[str, Any] = json.loads(message)
                kind, now = event["type"], time.monotonic() - begin
                if kind.endswith("speech_started"):
                    starts[event["item_id"]] = event["audio_start_ms"] / 1000
                elif kind.endswith("speech_stopped"):
                    ends[event["item_id"]] = event["audio_end_ms"] / 1000 - PADDING_S
                elif kind.endswith("transcription.completed"):
                    end = ends[event["item_id"]]
                    bound = 0.3 + 0.3 * (end - starts[event["item_id"]] - PADDING_S)
                    found.append((now - end, bound))
                    print(f"{client}: {end:.1f} s, lag {now - end:.2f} s, bound {bound:.2f} s: {event['transcript']}")

        listener = asyncio.create_task(listen())
        size = 2 * round(PIECE_S * RATE)
        for place in range(0, rounds * len(data), size):
            piece = (data + data)[place % len(data) :][:size]
            await socket.send(
                json.dumps({"type": "input_audio_buffer.append", "audio": base64.b64encode(piece).decode()})
            )
            await asyncio.sleep(max(0.0, begin + (place + size) / (2 * RATE) - time.monotonic()))
        deadline = time.monotonic() + 60
        while len(found) < len(ends) and time.monotonic() < deadline:
            await asyncio.sleep(PIECE_S)
        listener.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await listener
    return found


async def main() -> None:
    """Clients side by side."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url")
    parser.add_argument("sound", type=Path)
    parser.add_argument("--clients", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    samples, rate = soundfile.read(args.sound, dtype="float32", always_2d=True)
    heard = soxr.resample(samples.mean(1), rate, RATE)
    heard = np.concatenate([heard, np.zeros(round(PAUSE_S * RATE), np.float32)])
    data = (heard.clip(-1, 1) * 32767).astype("<i2").tobytes()
    told = await asyncio.gather(*(speak(args.url, client, data, args.rounds) for client in range(args.clients)))
    turns = [each for found in told for each in found]
    lags = [lag for lag, _ in turns]
    late = sum(lag > bound for lag, bound in turns)
    load = ", ".join(f"{each:.1f}" for each in os.getloadavg())
    print(f"{len(turns)} turns, {late} later than their bound; median {statistics.median(lags):.2f} s, "
          f"latest {max(lags):.2f} s; load {load}")  # fmt: skip


if __name__ == "__main__":
    asyncio.run(main())

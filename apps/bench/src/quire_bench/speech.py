"""`quire bench speech`: recordings sent to any server of OpenAI's `/v1/audio/transcriptions`, several at a time.

Knows nothing of the model behind the address. Recordings are WAV files, whose length this process reads itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import time
import wave
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp

from quire_bench.report import percentiles
from quire_interfaces import ConfigError, QuireError

__all__ = ["SpeechLoad", "run_speech", "seconds_of"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeechLoad:
    """What is sent, and how.

    Raises:
        ConfigError: a value that cannot work.
    """

    files: Sequence[Path]
    """Sent in turn."""
    base_url: str = "http://127.0.0.1:8000"
    """With or without a closing /v1."""
    model: str | None = None
    """None leaves it out."""
    num_requests: int = 16
    max_concurrency: int = 8
    language: str | None = None
    timeout_s: float = 600.0
    """Bound on each request."""
    api_key: str | None = None
    """None takes OPENAI_API_KEY from the environment, if it is there."""

    def __post_init__(self) -> None:
        if not self.files:
            raise ConfigError("name at least one WAV file", field="files")
        for name in ("num_requests", "max_concurrency"):
            if getattr(self, name) < 1:
                raise ConfigError(f"--{name.replace('_', '-')} must be at least 1", field=name)

    def fields(self) -> dict[str, str]:
        """Of the form, beside the file."""
        fields = {"stream": "true", "response_format": "json"}
        fields |= {} if self.model is None else {"model": self.model}
        return fields | ({} if self.language is None else {"language": self.language})


@dataclass(frozen=True, slots=True)
class _Answer:
    sound_s: float
    first_text_s: float | None
    """None where nothing was heard."""
    total_s: float


def seconds_of(path: Path) -> float:
    """Length of a WAV file.

    Raises:
        ConfigError: it is none.
    """
    try:
        with wave.open(str(path)) as file:
            return float(file.getnframes() / file.getframerate())
    except (OSError, EOFError, wave.Error) as error:
        raise ConfigError(
            f"{path} is no WAV file ({error}); `ffmpeg -i FILE FILE.wav` makes one", field="files"
        ) from None


def run_speech(load: SpeechLoad) -> dict[str, Any]:
    """Send all requests; the figures.

    Raises:
        QuireError: a request failed; the message is the server's.
    """
    return asyncio.run(_run(load))


async def _run(load: SpeechLoad) -> dict[str, Any]:
    sounds = [(path.name, path.read_bytes(), seconds_of(path)) for path in load.files]
    key = load.api_key or os.environ.get("OPENAI_API_KEY")
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    free = asyncio.Semaphore(load.max_concurrency)
    timeout = aiohttp.ClientTimeout(total=load.timeout_s)
    async with aiohttp.ClientSession(headers=headers, timeout=timeout) as session:

        async def one(index: int) -> _Answer:
            async with free:
                return await _transcribed(session, load, *sounds[index % len(sounds)])

        start_s = time.perf_counter()
        answers = await asyncio.gather(*map(one, range(load.num_requests)))
        wall_s = time.perf_counter() - start_s
    sound_s = sum(each.sound_s for each in answers)
    return {
        "requests": len(answers),
        "sound_s": sound_s,
        "wall_s": wall_s,
        "sound_per_second": sound_s / wall_s,
        "real_time_factor": wall_s / sound_s,
        "requests_without_text": sum(each.first_text_s is None for each in answers),
        "first_text_s": percentiles([each.first_text_s for each in answers if each.first_text_s is not None]),
        "latency_s": percentiles([each.total_s for each in answers]),
        "latency_per_sound": percentiles([each.total_s / each.sound_s for each in answers]),
    }


async def _transcribed(
    session: aiohttp.ClientSession, load: SpeechLoad, name: str, data: bytes, sound_s: float
) -> _Answer:
    form = aiohttp.FormData(load.fields())
    form.add_field("file", data, filename=name, content_type="audio/wav")
    url = load.base_url.rstrip("/").removesuffix("/v1") + "/v1/audio/transcriptions"
    start_s, first_s = time.perf_counter(), None
    try:
        async with session.post(url, data=form) as response:
            if response.status != 200:
                raise QuireError(f"{url} answers {response.status}: {(await response.text())[:300]}")
            async for line in response.content:
                if first_s is None and _has_text(line):
                    first_s = time.perf_counter() - start_s
    except (aiohttp.ClientError, OSError, TimeoutError) as error:
        raise QuireError(f"{url} does not answer: {error or type(error).__name__}") from None
    return _Answer(sound_s, first_s, time.perf_counter() - start_s)


def _has_text(line: bytes) -> bool:
    """Whether a line of the stream is an event with text, of OpenAI's form or of vLLM's."""
    with contextlib.suppress(ValueError, LookupError, TypeError, AttributeError):
        event = json.loads(line.removeprefix(b"data:"))
        return bool(str(event.get("delta") or event["choices"][0]["delta"]["content"]).strip())
    return False

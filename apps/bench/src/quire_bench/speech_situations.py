"""What a comparison of engines that transcribe measures: one recording, and several at once."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from quire_bench.limits import MachineLimits, ModelWork
from quire_bench.situations import Lengths, Situation
from quire_bench.spoken import Speech
from quire_bench.workload import RecordingRequest
from quire_interfaces import ConfigError

__all__ = ["SpeechSituation", "parse_speech_situations"]

SECONDS_AT_ONCE = 30
"""Of each recording, where several are transcribed at once: a window of Whisper."""
WARM_UP_SEED = 500
ROWS = {
    "file": "real-time factor: s for a second of sound (less is better)",
    "files": "seconds of sound in a second",
    "cpu": "processor time, s for a second of sound (less is better)",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeechSituation:
    """One row of the comparison; those of the same recordings come from one run."""

    name: str
    kind: str
    """A key of `ROWS`."""
    speech: Speech
    num_requests: int
    """Recordings at once."""
    seconds: int
    """Of each."""
    output_len: int
    """Most tokens of a window."""
    bound: ClassVar[None] = None
    """No rate of the machine."""

    @property
    def title(self) -> str:
        """What the figures are."""
        count = "a recording" if self.num_requests == 1 else f"{self.num_requests} recordings at once, each"
        return f"{count} of {self.seconds} s, {ROWS[self.kind]}"

    @property
    def sends_requests(self) -> bool:
        return self.kind != "cpu"

    @property
    def max_model_len(self) -> int:
        """Tokens of a window, and those that it begins with."""
        return self.output_len + 8

    def measure(self, serve: Callable[[Sequence[RecordingRequest]], dict[str, Any]], seed: int) -> dict[str, float]:
        """Row -> figure, from a run of an engine; other recordings of the same lengths come first and do not count.

        Args:
            serve: Transcribes all, and says "seconds" and, of all threads together, "cpu_s".
            seed: Of the recordings.
        """
        serve(self._requests(seed + WARM_UP_SEED))
        reply = serve(self._requests(seed))
        sound_s = self.num_requests * self.seconds
        seconds = float(reply["seconds"])
        figure = sound_s / seconds if self.kind == "files" else seconds / sound_s
        return {self.name: figure, f"{self.name}-cpu": float(reply["cpu_s"]) / sound_s}

    def limit(self, machine: MachineLimits, work: ModelWork) -> float | None:
        """None: a model's work does not count its encoder."""
        return None

    def _requests(self, seed: int) -> list[RecordingRequest]:
        paths = [self.speech.recording(self.seconds, 1000 * seed + each) for each in range(self.num_requests)]
        return [RecordingRequest(path=path, output_len=self.output_len) for path in paths]


def parse_speech_situations(text: str, speech: Speech, output_len: int) -> list[Situation | SpeechSituation]:
    """Situations by name, comma-separated; "file-N" and "files-N" are two rows each.

    Args:
        speech: Makes the recordings.
        output_len: Most tokens of a window.

    Raises:
        ConfigError: an unknown name.
    """
    situations: list[Situation | SpeechSituation] = []
    for name in dict.fromkeys(part.strip() for part in text.split(",")):
        if name in ("first-token", "memory"):
            situations.append(Situation(name=name, kind=name, lengths=Lengths()))
        elif match := re.fullmatch(r"(files?)-([1-9]\d{0,3})", name):
            count, seconds = (int(match[2]), SECONDS_AT_ONCE) if match[1] == "files" else (1, int(match[2]))
            situations += [
                SpeechSituation(
                    name=row, kind=kind, speech=speech, num_requests=count, seconds=seconds, output_len=output_len
                )
                for row, kind in ((name, match[1]), (f"{name}-cpu", "cpu"))
            ]
        else:
            raise ConfigError(
                f"situations of task speech must be among first-token, file-N, files-N, memory, got {name!r}",
                field="situations",
            )
    return situations

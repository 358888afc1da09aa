"""`quire transcribe FILE...`: recordings to text and subtitles, by a server of its own or a running one."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Generator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from quire import QuireConfig
from quire.setting_fields import Origin
from quire_interfaces import ConfigError, QuireError
from quire_server.config import ServerConfig
from quire_server.terminal.api_client import APIClient, NoServerError
from quire_server.terminal.chat import first_model
from quire_server.terminal.run import OwnServer, settings_of_run
from quire_speech import Segment, Transcription, Word
from quire_speech.transcript_forms import TranscriptForm, written

__all__ = ["TranscribeOptions", "transcribe"]

_ENDINGS = {"text": ".txt", "srt": ".srt", "vtt": ".vtt", "json": ".json", "verbose_json": ".json"}


class TranscribeOptions(NamedTuple):
    """What the command was told beside settings."""

    files: Sequence[str]
    form: TranscriptForm
    output_dir: str | None
    language: str | None
    translates: bool
    prompt: str | None
    has_words: bool
    leaves_silence_out: bool
    url: str | None
    model_name: str | None
    api_key: str | None
    timeout_s: float
    is_quiet: bool

    @property
    def granularities(self) -> tuple[str, ...]:
        """What verbose_json has lists of."""
        return ("segment", "word") if self.has_words else ("segment",)

    def fields(self, model: str) -> dict[str, str]:
        """Of the form that is sent."""
        fields = {"model": model, "response_format": "verbose_json"}
        fields |= {"language": self.language} if self.language else {}
        fields |= {"prompt": self.prompt} if self.prompt else {}
        fields |= {"timestamp_granularities[]": "word"} if self.has_words else {}
        return fields | ({"chunking_strategy": "auto"} if self.leaves_silence_out else {})


def transcribe(
    config: QuireConfig,
    server: ServerConfig,
    origins: Mapping[str, Origin],
    options: TranscribeOptions,
    factory: tuple[str, dict[str, Any]] | None = None,
) -> int:
    """Transcribe all files; the exit status: 1 where one failed, the others are written all the same.

    Raises:
        QuireError: a setting is wrong, a file is missing, or no server can be had.
    """
    files = [Path(name) for name in options.files]
    missing = [str(path) for path in files if not path.is_file()]
    if missing:
        raise ConfigError(f"there is no file {missing[0]!r}", field="FILE")
    folder = None if options.output_dir is None else Path(options.output_dir)
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
    num_failed = 0
    with _client(config, server, origins, options, factory) as client:
        model = first_model(client, options.model_name)
        for path in files:
            try:
                text = written(
                    _transcribed(client, model, path, options),
                    options.form,
                    task="translate" if options.translates else "transcribe",
                    granularities=options.granularities,
                )
            except NoServerError:
                raise
            except (QuireError, OSError) as error:
                num_failed += 1
                print(f"quire: {path}: {error}", file=sys.stderr)
                continue
            if folder is not None:
                (folder / (path.stem + _ENDINGS[options.form])).write_text(text, encoding="utf-8")
            else:
                title = f"==> {path} <==\n" if len(files) > 1 and options.form == "text" else ""
                print(title + text, end="", flush=True)
    return 1 if num_failed else 0


@contextlib.contextmanager
def _client(
    config: QuireConfig,
    server: ServerConfig,
    origins: Mapping[str, Origin],
    options: TranscribeOptions,
    factory: tuple[str, dict[str, Any]] | None,
) -> Generator[APIClient, None, None]:
    if options.url is not None:
        yield APIClient(options.url, options.api_key, timeout_s=options.timeout_s)
        return
    if config.model.model is None:
        raise ConfigError(
            "name a model that hears, as in --model Qwen/Qwen3-ASR-0.6B, or a running server with --url", field="model"
        )
    config, server = settings_of_run(config, server, origins)
    child = OwnServer(config, server, factory)
    try:
        yield APIClient(child.address(), server.api_key[0], timeout_s=options.timeout_s)
    finally:
        child.stop()


def _transcribed(client: APIClient, model: str, path: Path, options: TranscribeOptions) -> Transcription:
    route = "/v1/audio/translations" if options.translates else "/v1/audio/transcriptions"
    segments: list[Segment] = []
    duration_s, done = 0.0, dict[str, Any]()
    progress = _Progress(path, is_shown=not options.is_quiet and sys.stderr.isatty())
    try:
        for event in client.upload_events(route, options.fields(model), path):
            duration_s = float(event.get("duration", duration_s))
            if event.get("type") == "transcript.text.done":
                done = event
            elif "segment" in event:
                segments.append(_segment(event["segment"]))
                progress.show(segments[-1].end_s, duration_s)
    finally:
        progress.clear()
    return Transcription(
        text=done.get("text", ""),
        language=done.get("language", ""),
        language_probability=float(done.get("language_probability", 0.0)),
        duration_s=duration_s,
        segments=tuple(segments),
    )


def _segment(fields: Mapping[str, Any]) -> Segment:
    words = fields.get("words")
    return Segment(
        index=fields["id"],
        seek_s=fields["seek"] / 100,
        start_s=fields["start"],
        end_s=fields["end"],
        text=fields["text"],
        token_ids=tuple(fields["tokens"]),
        temperature=fields["temperature"],
        avg_logprob=fields["avg_logprob"],
        compression_ratio=fields["compression_ratio"],
        no_speech_prob=fields["no_speech_prob"],
        words=None if words is None else tuple(_word(each) for each in words),
    )


def _word(fields: Mapping[str, Any]) -> Word:
    return Word(start_s=fields["start"], end_s=fields["end"], text=fields["word"], probability=fields["probability"])


class _Progress:
    """One line at the terminal: how far into a recording the text goes.

    Args:
        path: Of the recording.
        is_shown: Whether there is a terminal that wants it.
    """

    def __init__(self, path: Path, *, is_shown: bool) -> None:
        self._path, self._is_shown = path, is_shown

    def show(self, at_s: float, duration_s: float) -> None:
        if self._is_shown:
            share = f"{min(at_s / duration_s, 1):4.0%}" if duration_s else ""
            print(f"\r\033[K{self._path.name}  {_clock(at_s)} of {_clock(duration_s)} {share}", end="", file=sys.stderr)

    def clear(self) -> None:
        if self._is_shown:
            print("\r\033[K", end="", file=sys.stderr, flush=True)


def _clock(seconds: float) -> str:
    minutes, seconds = divmod(int(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{seconds:02}"

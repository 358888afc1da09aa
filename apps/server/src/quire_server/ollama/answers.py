"""The answers of Ollama's API: lines of a stream or whole, with times in nanoseconds."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from datetime import UTC, datetime
from typing import Any

import msgspec
from msgspec import UNSET, UnsetType
from starlette.responses import Response

from quire_engine import CompletionOutput, RequestMetrics, RequestOutput
from quire_server.errors import ollama_error_body
from quire_server.logprobs import chat_logprobs
from quire_server.responses import ChatTokenLogprob
from quire_server.streaming import EventStream

__all__ = ["OllamaAnswer", "OllamaMessage", "Times", "done_reason", "line", "lines", "logprobs_of", "now"]

_encoder = msgspec.json.Encoder()


class OllamaMessage(msgspec.Struct, kw_only=True):
    """What the model says, or a piece of it."""

    role: str = "assistant"
    content: str = ""
    thinking: str | UnsetType = UNSET
    tool_calls: list[dict[str, Any]] | UnsetType = UNSET


class Times(msgspec.Struct, kw_only=True):
    """What an answer cost: durations in nanoseconds, and tokens."""

    total_duration: int
    load_duration: int = 0
    """The model was loaded before."""
    prompt_eval_count: int
    prompt_eval_duration: int
    eval_count: int
    eval_duration: int

    @classmethod
    def of(cls, output: RequestOutput) -> Times:
        """Of an answer's last output. The parts of an answer that was computed as several requests add up."""
        metrics: Sequence[RequestMetrics] = output.metrics
        first = min((each.arrival_time_s for each in metrics), default=0.0)
        last = max((each.finished_time_s for each in metrics), default=first)
        return cls(
            total_duration=_nanoseconds(last - first),
            prompt_eval_count=len(output.prompt_token_ids),
            prompt_eval_duration=_nanoseconds(sum(_prompt_s(each) for each in metrics)),
            eval_count=output.num_generation_tokens,
            eval_duration=_nanoseconds(sum(_output_s(each) for each in metrics)),
        )


def _prompt_s(metrics: RequestMetrics) -> float:
    """From when a request was first scheduled to its first token."""
    return metrics.first_token_time_s - metrics.scheduled_time_s if metrics.first_token_time_s else 0.0


def _output_s(metrics: RequestMetrics) -> float:
    """From its first token to its end."""
    return metrics.finished_time_s - metrics.first_token_time_s if metrics.first_token_time_s else 0.0


def _nanoseconds(seconds: float) -> int:
    return max(0, round(seconds * 1e9))


class OllamaAnswer(msgspec.Struct, kw_only=True):
    """A line of a stream, or a whole answer: `message` in chats, `response` in completions."""

    model: str
    created_at: str
    message: OllamaMessage | UnsetType = UNSET
    response: str | UnsetType = UNSET
    thinking: str | UnsetType = UNSET
    done: bool
    done_reason: str | UnsetType = UNSET
    context: list[int] | UnsetType = UNSET
    logprobs: list[ChatTokenLogprob] | UnsetType = UNSET
    total_duration: int | UnsetType = UNSET
    load_duration: int | UnsetType = UNSET
    prompt_eval_count: int | UnsetType = UNSET
    prompt_eval_duration: int | UnsetType = UNSET
    eval_count: int | UnsetType = UNSET
    eval_duration: int | UnsetType = UNSET

    def add_times(self, times: Times) -> None:
        """Say what it cost."""
        for name in Times.__struct_fields__:
            setattr(self, name, getattr(times, name))


def now() -> str:
    """This moment, as Ollama writes it."""
    return datetime.now(UTC).isoformat().replace("+00:00", "Z")


def done_reason(reason: str | None) -> str:
    """Why an answer ended: "stop" also where it is calls of tools, "length", or the engine's own word."""
    return "stop" if reason in (None, "tool_calls") else reason


def logprobs_of(output: CompletionOutput) -> list[ChatTokenLogprob] | UnsetType:
    """Log probabilities of an output's tokens, where they were asked for."""
    found = chat_logprobs(output)
    return found.content if found is not None else UNSET


def line(value: msgspec.Struct | dict[str, Any]) -> bytes:
    """One line of a stream."""
    return _encoder.encode(value) + b"\n"


async def lines(events: AsyncGenerator[bytes, None]) -> Response:
    """A stream of lines. What fails before the first of them still has a status of its own."""
    return await EventStream.begin(
        events,
        end=b"",
        on_error=lambda error: line(ollama_error_body(error)),
        media_type="application/x-ndjson",
    )

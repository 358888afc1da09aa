"""What a caller gets back: `RequestOutput` with one `CompletionOutput` per completion. Plain data."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from quire_engine.metrics import RequestMetrics
from quire_interfaces import FinishReason

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["CompletionOutput", "Logprob", "RequestOutput"]


@dataclass(slots=True)
class Logprob:
    """The log probability of one token at one position."""

    token_id: int
    logprob: float
    rank: int | None
    """1 is the most likely token of the vocabulary; None for tokens that were asked for by `logprob_token_ids`."""
    decoded_token: str = ""
    """The token as text; invalid UTF-8 as U+FFFD."""
    token_bytes: bytes = b""
    """The exact bytes it adds to the text."""


@dataclass(slots=True, kw_only=True)
class CompletionOutput:
    """One completion (of n). In a delta, text, token_ids, logprobs and text_offsets hold only what is new."""

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    """The token that ended the output is included, its text is not (unless include_stop_str_in_output)."""
    logprobs: list[list[Logprob]] | None = None
    """Per token: the chosen token first, then the most likely ones, best first, or those that were named. None when not
    asked for."""
    cumulative_logprob: float | None = None
    """Sum over the tokens so far; None where no log probabilities were computed."""
    text_offsets: list[int] = field(default_factory=list)
    """Per token: where its text begins in the whole output; empty where no text is made."""
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    """The stop string, or the id of the stop token the caller named; None for the model's own end token."""
    error: str | None = None
    """With FinishReason.ERROR: why."""
    error_code: str | None = None
    """Where the request itself is wrong: a machine-readable reason (`RequestError.code`); None where computing it
    failed."""
    error_param: str | None = None
    """The field at fault, if it is one."""
    routed_experts: NDArray[Any] | None = None
    """With the end, where the engine returns them: the experts that routers chose, [tokens of prompt and output - 1,
    layers with routed experts, experts of a token] uint8, or uint16 where there are more than 256. The last token of
    the output was not computed, so that it has none."""
    error_signal: str | None = None
    """Name of the signal that ended the process that computed it, e.g. "SIGKILL"; None where none did."""

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    def take_error(self, other: CompletionOutput) -> None:
        """Fail as another one of this request has failed."""
        self.error, self.error_code = other.error, other.error_code
        self.error_param, self.error_signal = other.error_param, other.error_signal


@dataclass(slots=True, kw_only=True)
class RequestOutput:
    """What is new of one request, or all of it, as its `OutputKind` says."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    """Completions with something new (all of them when cumulative), by index."""
    finished: bool
    """Whether all completions have ended."""
    num_cached_tokens: int = 0
    """Prompt tokens that the prefix cache had."""
    prompt_logprobs: list[list[Logprob] | None] | None = None
    """Per prompt token (None for the first), when asked for; in a delta, only with the first output that has them."""
    num_generation_tokens: int = 0
    """Output tokens of all completions so far."""
    metrics: list[RequestMetrics] = field(default_factory=list)
    """Times and counts, one per completion."""
    kv_transfer_params: dict[str, Any] | None = None
    """Where the request's keys and values are held for another engine, when it asked for that: to be handed on."""

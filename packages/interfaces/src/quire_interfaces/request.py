"""A request as the policy side sees it: token ids, progress, state. No text, no tensors.

One owner writes a `Request` after it was made: the scheduler. The KV cache manager reads it and writes only
`block_hashes` (it appends), `encoder_hash` and `num_cached_tokens`.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from quire_interfaces.media import PromptMedia
from quire_interfaces.pooling import PoolingParams
from quire_interfaces.sampling_params import SamplingParams

__all__ = ["FinishReason", "OutputKind", "Request", "RequestOptions", "RequestStatus"]


class RequestStatus(enum.IntEnum):
    """Where a request is. WAITING and PREEMPTED are in the waiting queue, RUNNING holds a row, the rest are over."""

    WAITING = 0
    RUNNING = 1
    PREEMPTED = 2
    FINISHED = 3


class FinishReason(enum.StrEnum):
    """Why a request ended, with the names of the OpenAI API where it has one."""

    STOP = "stop"
    """A stop token or stop string."""
    LENGTH = "length"
    """max_tokens, or the end of the context."""
    ABORT = "abort"
    """The client went away or asked to cancel."""
    ERROR = "error"
    """This request failed; its error says why."""


class OutputKind(enum.Enum):
    """What each output of a request holds, on its way to the caller."""

    DELTA = "delta"
    """Only what is new since the output before."""
    CUMULATIVE = "cumulative"
    """Everything so far."""
    FINAL_ONLY = "final_only"
    """Everything, once, at the end."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestOptions:
    """Everything about a request but its prompt and its sampling. Handed on whole, from whoever takes the request to
    the scheduler: a new option is a field here, and a line where it is read."""

    priority: int = 0
    """Lower runs first, under the priority policy."""
    cache_salt: str | None = None
    """Prefix cache isolation: only requests with the same salt share blocks."""
    adapter: str | None = None
    """Name of the LoRA adapter to run with; None for the network as it is."""
    tenant: str | None = None
    """On whose behalf the request runs, for fair sharing; None for nobody in particular."""
    client_request_id: str | None = None
    """Name of what the client asked, which may take several requests; None where it has none. For those who watch."""
    output_kind: OutputKind | None = None
    """What each output holds; None for deltas where outputs are streamed (`AsyncEngine`), and for everything at the end
    where they are collected (`LLMEngine`)."""
    data_parallel_rank: int | None = None
    """Rank of the engine to run in, where there are several; None for the one that suits best."""


@dataclass(slots=True, kw_only=True, eq=False)
class Request:
    """One sequence to be continued (n > 1 was split into n requests before).

    Invariants: `0 <= num_computed_tokens <= num_tokens + num_in_flight_tokens`; `block_hashes` covers whole blocks of
    known tokens only, in order.
    """

    request_id: str
    prompt_token_ids: list[int]
    sampling_params: SamplingParams
    seed: int
    """Resolved seed: sampling_params.seed, or a fresh one."""
    stop_token_ids: frozenset[int] = frozenset()
    """All ids that end the output: the model's eos ids (unless ignore_eos) and sampling_params.stop_token_ids."""
    max_tokens: int
    """Resolved bound on output tokens: sampling_params.max_tokens and the context length, whichever is smaller."""
    arrival_time_s: float = 0.0
    options: RequestOptions = field(default_factory=RequestOptions)
    cache_extra_keys: tuple[tuple[int, int, str], ...] = ()
    """(first token, end token, key): content that token ids do not identify, e.g. a media hash; in block hashes."""
    media: PromptMedia | None = None
    """Images, videos and sounds among the tokens of the prompt; their keys are in `cache_extra_keys`."""
    encoder_token_ids: list[int] = field(default_factory=list)
    """What the encoder reads, for networks that have one; the prompt is then what the decoder begins with."""
    prompt_group: str | None = None
    """Requests of one group have the same prompt: one of them computes it, the others use its blocks."""
    pooling_params: PoolingParams | None = None
    """How the hidden states of the prompt are pooled; None for a request that generates. What is pooled ends with one
    stop token, which stands for the output and needs no place in the context."""
    second_segment_start: int = 0
    """Position of the first token of the second text, where the prompt is a pair with token types; 0 elsewhere."""
    adapter_version: str = ""
    """Version that `options.adapter` named when the request came; it keeps this one until it ends."""
    adapter_slot: int = -1
    """The device slot its adapter is in while RUNNING."""
    reads_prefix_cache: bool = True
    """False when every prompt position must be computed (prompt_logprobs, pooling of more than the last token)."""
    grammar_was_compiled: bool = False
    """Whether another engine, or this one before it was started again, has compiled the constraint."""

    status: RequestStatus = RequestStatus.WAITING
    finish_reason: FinishReason | None = None
    output_token_ids: list[int] = field(default_factory=list)
    """Sampled tokens that the scheduler has seen."""
    draft_token_ids: list[int] = field(default_factory=list)
    """Proposed continuation to verify in the next step."""
    draft_parents: list[int] = field(default_factory=list)
    """What each of these tokens follows, if they are a tree; else empty."""
    num_computed_tokens: int = 0
    """Tokens whose KV is written once every step handed out so far has run."""
    num_in_flight_tokens: int = 0
    """Output tokens that steps still running will produce (asynchronous scheduling); their ids are not known here."""
    num_cached_tokens: int = -1
    """Prompt tokens found in the prefix cache at first scheduling; -1 before."""
    num_external_tokens: int = 0
    """Number of these tokens that a KV tier brought into memory for it."""
    num_preemptions: int = 0
    row: int = -1
    """The runner row this request holds while RUNNING, else -1."""
    block_hashes: list[bytes] = field(default_factory=list)
    encoder_hash: bytes = b""
    """Of the whole encoder input with its salt and keys, once the KV cache asked for it."""

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)

    @property
    def num_tokens(self) -> int:
        """Known tokens: prompt and output."""
        return len(self.prompt_token_ids) + len(self.output_token_ids)

    @property
    def is_finished(self) -> bool:
        return self.status == RequestStatus.FINISHED

    def token_ids(self, start: int, end: int) -> list[int]:
        """Known token ids in [start, end), across the border of prompt and output."""
        num_prompt = len(self.prompt_token_ids)
        if end <= num_prompt:
            return self.prompt_token_ids[start:end]
        if start >= num_prompt:
            return self.output_token_ids[start - num_prompt : end - num_prompt]
        return self.prompt_token_ids[start:] + self.output_token_ids[: end - num_prompt]

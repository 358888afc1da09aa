"""Everything that crosses between a client and the engine core: tagged msgspec structs, encoded as MessagePack.

Knows how messages look; knows neither sockets nor what is done with them. Times are `time.monotonic()` seconds, which
on one machine mean the same in every process.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from quire_interfaces import (
    ContextLengthError,
    EngineCoreOutput,
    ModelNotFoundError,
    OverloadedError,
    PoolingParams,
    PoolingTask,
    PromptMedia,
    QuireError,
    Request,
    RequestError,
    RequestOptions,
    SamplingParams,
    SchedulerStats,
    TokenExperts,
    TokenLogprobs,
)

__all__ = [
    "AbortRequests",
    "AddRequest",
    "ClientMessage",
    "CoreMessage",
    "EngineFailed",
    "EngineInfo",
    "EngineProgress",
    "EngineReady",
    "EngineStopped",
    "Outputs",
    "RequestRejected",
    "Shutdown",
    "UtilityCall",
    "UtilityReply",
    "decode_client_message",
    "decode_core_message",
    "encode_message",
    "merge_outputs",
    "pack_token_ids",
    "unpack_token_ids",
]


def pack_token_ids(token_ids: Sequence[int]) -> bytes:
    """Token ids as little-endian uint32; for 100,000 tokens a third cheaper than a MessagePack list, both ways.

    Raises:
        RequestError: an element is not an integer in [0, 2**32).
    """
    try:
        packed = array("I", token_ids)
    except (TypeError, OverflowError) as error:
        raise RequestError(
            f"prompt token ids must be whole numbers from 0 to {2**32 - 1}: {error}", param="prompt"
        ) from None
    if sys.byteorder != "little":
        packed.byteswap()
    return packed.tobytes()


def unpack_token_ids(packed: bytes) -> list[int]:
    """Inverse of `pack_token_ids`."""
    token_ids = array("I")
    token_ids.frombytes(packed)
    if sys.byteorder != "little":
        token_ids.byteswap()
    return token_ids.tolist()


class _Message(msgspec.Struct, tag=True, array_like=True, kw_only=True):
    """Base of all messages: the class name travels as the tag."""


class AddRequest(_Message):
    """One sequence to be continued, with everything resolved (one of the n completions of a client's request)."""

    request_id: str
    prompt: bytes
    """`pack_token_ids` of the prompt; where there is an encoder, of what the decoder begins with."""
    sampling_params: SamplingParams
    seed: int
    max_tokens: int
    stop_token_ids: frozenset[int] = frozenset()
    output_token_ids: list[int] = []
    """Tokens a former engine process already produced; the output goes on after them."""
    options: RequestOptions = RequestOptions()
    cache_extra_keys: tuple[tuple[int, int, str], ...] = ()
    media: PromptMedia | None = None
    encoder_prompt: bytes = b""
    """`pack_token_ids` of what the encoder reads."""
    pooling_params: PoolingParams | None = None
    second_segment_start: int = 0
    reads_prefix_cache: bool = True
    """Whether the output needs no more than what is computed behind a cached prefix."""
    prompt_group: str | None = None
    arrival_time_s: float = 0.0
    grammar_was_compiled: bool = False
    """An engine has compiled its constraint before."""

    def to_request(self) -> Request:
        """The request as the scheduler wants it."""
        return Request(
            request_id=self.request_id,
            prompt_token_ids=unpack_token_ids(self.prompt),
            sampling_params=self.sampling_params,
            seed=self.seed,
            stop_token_ids=self.stop_token_ids,
            max_tokens=self.max_tokens,
            arrival_time_s=self.arrival_time_s,
            options=self.options,
            cache_extra_keys=self.cache_extra_keys + (() if self.media is None else self.media.extra_keys),
            media=self.media,
            encoder_token_ids=unpack_token_ids(self.encoder_prompt),
            prompt_group=self.prompt_group,
            pooling_params=self.pooling_params,
            second_segment_start=self.second_segment_start,
            reads_prefix_cache=self.reads_prefix_cache and self.sampling_params.prompt_logprobs is None,
            output_token_ids=list(self.output_token_ids),
            grammar_was_compiled=self.grammar_was_compiled,
        )

    def resumed(self, output_token_ids: list[int]) -> AddRequest:
        """This request for a new engine process, after `output_token_ids` were produced by the former one."""
        params = self.sampling_params
        if output_token_ids and params.prompt_logprobs is not None:
            params = replace(params, prompt_logprobs=None)  # they came before the first token
        return msgspec.structs.replace(self, sampling_params=params, output_token_ids=output_token_ids)


class AbortRequests(_Message):
    """Stop these requests now and say nothing more about them."""

    request_ids: list[str]


class UtilityCall(_Message):
    """A control call; answered by a `UtilityReply` with the same `call_id`."""

    call_id: int
    method: str
    """One of `core_loop.UTILITIES`."""
    arguments: dict[str, Any] = {}


class Shutdown(_Message):
    """Take no new requests, finish those in flight within `drain_s` seconds, abort the rest, stop."""

    drain_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineInfo:
    """Facts about a running engine, as its factory reports them."""

    model: str = ""
    max_model_len: int
    """Most tokens of prompt and output together."""
    vocab_size: int
    """Token ids must be below this."""
    max_encoder_len: int = 0
    """Most tokens of a prompt where an encoder reads it (`max_model_len` is then the decoder's); 0 without one."""
    decoder_start_token_ids: tuple[int, ...] = ()
    """What the decoder begins with, where an encoder reads the prompt."""
    modalities: tuple[str, ...] = ()
    """What prompts may hold beside tokens: "image", "video", "audio", and "embeds" for embeddings of callers that take
    the place of tokens; none where the engine takes text alone."""
    runner: str = "generate"
    """What the engine runs: "generate" for tokens, "pooling" for pooled hidden states alone."""
    pooling_tasks: tuple[PoolingTask, ...] = ()
    """Tasks of requests that are pooled, the one of a request that names none first; none where none are taken."""
    cached_pooling_tasks: tuple[PoolingTask, ...] = ()
    """Tasks that pool the last token alone, so that they read cached prefixes."""
    embedding_size: int = 0
    """Numbers of an embedding; 0 where no task makes any."""
    max_embed_len: int = 0
    """Most tokens of a prompt that is embedded: where more than `max_model_len`, in chunks that are averaged; 0 for
    `max_model_len`."""
    returns_routed_experts: bool = False
    """Outputs tell which experts the routers chose for each token."""
    aligns_words: bool = False
    """Texts can be aligned with the sounds that the encoder hears (`quire_engine.alignment`)."""
    needs_audio: bool = False
    """Every token that is generated stands for a part of a sound, so that a prompt without one is refused."""
    mm_encoder_only: bool = False
    """The engine has towers and no language model: a request ends when its media are encoded."""
    num_blocks: int = 0
    """KV cache blocks, without the null block."""
    block_size: int = 0
    """Token slots in a block."""
    max_num_seqs: int = 0
    dtype: str = ""
    kv_cache_dtype: str = ""
    """What keys and values are kept in."""
    device: str = ""
    batch_invariant: bool = False
    """A request's tokens depend on nothing but the request: not on others, on chunks or on what was cached."""
    structured_output_backend: str = ""
    """What compiles constraints on outputs; empty when this engine takes none."""
    max_grammar_bytes: int = 1 << 20
    """Largest constraint, as text."""
    adapters: dict[str, str] = field(default_factory=dict)
    """Name -> folder of each adapter that was there at the start."""
    default_mm_adapters: dict[str, str] = field(default_factory=dict)
    """Modality -> name of the adapter that requests with such media run with unless they choose one."""
    takes_adapters: bool = False
    """Requests may choose adapters, and adapters may be loaded."""
    merges_adapters: bool = False
    """Adapters move into the network's weights and out of them: their requests' tokens depend on what else runs."""
    memory_bytes: dict[str, int] = field(default_factory=dict)
    """The memory ledger: what -> bytes."""
    choices: dict[str, str] = field(default_factory=dict)
    """What was chosen, and why: "attention" -> "torch_sdpa: ..."."""
    timings_s: dict[str, float] = field(default_factory=dict)
    """Start-up phases."""
    extra: dict[str, Any] = field(default_factory=dict)
    """Anything else, in plain types."""

    def decoder_prompt(self, token_ids: Sequence[int] | None) -> list[int]:
        """What the decoder begins with, where an encoder reads the prompt: these tokens, behind the one that every
        output begins with; none of them for what the checkpoint says.

        Raises:
            RequestError: neither says anything.
        """
        start = self.decoder_start_token_ids
        if token_ids:
            # A model that hears reads text of before in front of it.
            is_begun = set(start[:1]) <= set(token_ids) if self.modalities else tuple(token_ids[:1]) == start[:1]
            return [*(() if is_begun else start[:1]), *token_ids]
        if not start:
            raise RequestError(
                "this model's config.json names no decoder_start_token_id: give the decoder's prompt, too",
                param="decoder_prompt",
            )
        return list(start)


class EngineProgress(_Message):
    """How far the start-up is."""

    stage: str
    fraction: float
    """0 to 1."""


class EngineReady(_Message):
    """The engine takes requests from now on."""

    info: EngineInfo


class EngineFailed(_Message):
    """The engine could not start, or cannot go on; the last message of a process."""

    cause: str
    remedy: str = ""
    is_wrong_setting: bool = False
    """The cause is a setting that the engine refused."""
    signal: str | None = None
    """Name of the signal that ended a process of the engine (one of its ranks), and so the engine; None for another
    cause."""


class EngineStopped(_Message):
    """The engine shut down as it was asked to."""

    num_aborted: int = 0


class RequestRejected(_Message):
    """The engine did not accept a request. `kind` names the error class to raise."""

    request_id: str
    kind: str
    message: str
    param: str | None = None
    code: str = ""
    retry_after_s: float = 1.0
    num_prompt_tokens: int | None = None
    """This and the next two as in `ContextLengthError`."""
    max_model_len: int | None = None
    max_tokens: int | None = None

    @classmethod
    def from_error(cls, request_id: str, error: QuireError) -> RequestRejected:
        return cls(
            request_id=request_id,
            kind=_kind_of(error),
            message=str(error),
            param=getattr(error, "param", None),
            code=getattr(error, "code", "invalid_request"),
            retry_after_s=getattr(error, "retry_after_s", 1.0),
            num_prompt_tokens=getattr(error, "num_prompt_tokens", None),
            max_model_len=getattr(error, "max_model_len", None),
            max_tokens=getattr(error, "max_tokens", None),
        )

    def to_error(self) -> QuireError:
        if self.kind == "overloaded":
            return OverloadedError(self.message, retry_after_s=self.retry_after_s)
        if self.code == "model_not_found":
            return ModelNotFoundError(self.message)
        if self.kind == "context_length":
            return ContextLengthError(
                self.message,
                param=self.param,
                code=self.code,
                num_prompt_tokens=self.num_prompt_tokens,
                max_model_len=self.max_model_len,
                max_tokens=self.max_tokens,
            )
        return RequestError(self.message, param=self.param, code=self.code)


def _kind_of(error: QuireError) -> str:
    if isinstance(error, OverloadedError):
        return "overloaded"
    return "context_length" if isinstance(error, ContextLengthError) else "request"


class Outputs(_Message):
    """What one step brought."""

    outputs: list[EngineCoreOutput] = []
    started: list[str] = []
    """Requests that entered a row with this step (again, if they had been preempted)."""
    started_time_s: float = 0.0
    """When the step was planned."""
    step_tokens: list[int] = []
    """Tokens computed by each step since the last message: mostly one, more where outputs are held back
    (`stream_interval`)."""
    stats: SchedulerStats | None = None
    """From time to time, and whenever the engine runs empty."""
    rejected: list[RequestRejected] = []


class UtilityReply(_Message):
    """The answer to a `UtilityCall`."""

    call_id: int
    result: Any = None
    error: str | None = None
    param: str | None = None
    code: str = ""

    @classmethod
    def from_error(cls, call_id: int, error: BaseException) -> UtilityReply:
        if isinstance(error, QuireError):
            param, code = getattr(error, "param", None), getattr(error, "code", "invalid_request")
            return cls(call_id=call_id, error=str(error), param=param, code=code)
        return cls(call_id=call_id, error=f"{type(error).__name__}: {error}")

    def to_error(self) -> QuireError:
        if self.code == "model_not_found":
            return ModelNotFoundError(self.error or "")
        return RequestError(self.error or "", param=self.param, code=self.code or "invalid_request")


ClientMessage = AddRequest | AbortRequests | UtilityCall | Shutdown
"""Client to core."""
CoreMessage = Outputs | UtilityReply | EngineProgress | EngineReady | EngineFailed | EngineStopped
"""Core to client."""

_encoder = msgspec.msgpack.Encoder()
_client_decoder: msgspec.msgpack.Decoder[ClientMessage] = msgspec.msgpack.Decoder(ClientMessage)
_core_decoder: msgspec.msgpack.Decoder[CoreMessage] = msgspec.msgpack.Decoder(CoreMessage)


def encode_message(message: ClientMessage | CoreMessage) -> bytes:
    """To bytes.

    Raises:
        TypeError: something in the message (e.g. in `extra_args`) is no plain data.
    """
    return _encoder.encode(message)


def decode_client_message(data: bytes) -> ClientMessage:
    """From bytes sent by a client.

    Raises:
        msgspec.ValidationError, msgspec.DecodeError: these are not such bytes.
    """
    return _client_decoder.decode(data)


def decode_core_message(data: bytes) -> CoreMessage:
    """From bytes sent by an engine core. Raises like `decode_client_message`."""
    return _core_decoder.decode(data)


def merge_outputs(first: EngineCoreOutput, second: EngineCoreOutput) -> EngineCoreOutput:
    """Two consecutive outputs of one request as one."""
    return second._replace(
        new_token_ids=first.new_token_ids + second.new_token_ids,
        logprobs=_joined(first.logprobs, second.logprobs),
        prompt_logprobs=_joined(first.prompt_logprobs, second.prompt_logprobs),
        num_cached_tokens=max(first.num_cached_tokens, second.num_cached_tokens),
        routed_experts=joined_experts(first.routed_experts, second.routed_experts),
    )


def joined_experts(first: TokenExperts | None, second: TokenExperts | None) -> TokenExperts | None:
    """What two consecutive outputs say of experts. The second one is right where both speak of a token."""
    if first is None or second is None or second.start <= first.start:
        return first if second is None else second
    kept = first.data[: (second.start - first.start) * first.token_bytes]
    return first._replace(data=kept + second.data)


def _joined(first: list[TokenLogprobs] | None, second: list[TokenLogprobs] | None) -> list[TokenLogprobs] | None:
    return second if first is None else first if second is None else first + second

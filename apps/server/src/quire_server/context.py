"""What every route needs: the engine, the names it is served under, the limits. One per server, passed explicitly."""

from __future__ import annotations

import asyncio
import copy
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

from starlette.requests import Request

from quire import AsyncLLM
from quire.logprob_bound import check_logprobs
from quire.transfer_params import check_transfer
from quire_interfaces import Modality, ModelNotFoundError, OutputKind, RequestError, RequestOptions, SamplingParams
from quire_observability import EngineMetrics, current_request_id
from quire_pooling import PoolerSpec
from quire_server.callers import KEYLESS, APIKeys, Caller, read_api_keys
from quire_server.config import ServerConfig
from quire_server.errors import ClientGoneError, HTTPError
from quire_server.fingerprints import fingerprint_of
from quire_server.io_processors import IOProcessor, load_io_processor
from quire_server.large_bodies import BodyInspector
from quire_server.mcp_servers import MCPServer
from quire_server.protocol import SamplingFields, StreamOptions
from quire_server.rate_limits import RateLimiter
from quire_server.usage import UsageBook, make_usage_book
from quire_server.value_count import ValueBounds

if TYPE_CHECKING:
    from quire_server.live_settings import LiveSettings
    from quire_server.tracing import SpanSender

__all__ = ["OwnAdapter", "ServerContext", "all_of", "in_thread_when", "unless_disconnected"]

_STARTED_AT_ONCE = 16

Result = TypeVar("Result")


@dataclass(slots=True)
class ServerState:
    """What changes while a server runs, for all callers alike."""

    is_leaving: bool = False
    """The server was asked to stop: load balancers are to look elsewhere."""
    is_draining: bool = False
    """Running requests finish, new ones are refused."""
    is_asleep: bool = False
    """Without its KV cache: requests are refused until it is woken."""
    background: list[Callable[[], Coroutine[Any, Any, None]]] = field(default_factory=list)
    """What runs beside the requests, from the start of the HTTP server to its end."""
    on_notices: dict[str, Callable[..., None]] = field(default_factory=dict)
    """What other API processes of this server may tell -> who hears it (`HubClient.tell_others`)."""
    live_settings: LiveSettings | None = None
    """Settings that change while the server runs; None before its routes are made."""
    span_sender: SpanSender | None = None
    """Sends the spans of requests; None where they are not traced."""
    has_changed_level: bool = False
    """What is logged was changed since the start."""
    own_adapters: dict[str, OwnAdapter] = field(default_factory=dict)
    """Name in the engine -> an adapter that belongs to one caller; others are the server's, for all."""


class OwnAdapter(NamedTuple):
    """An adapter that a caller loaded for itself."""

    owner: str
    tenant: str
    name: str
    """What its owner calls it."""


class RequestFields(Protocol):
    """Fields of a body that say how its request is scheduled and answered."""

    model: str | None
    priority: int
    cache_salt: str | None
    stream: bool | None


@dataclass(slots=True)
class ServerContext:
    """The served engine and its limits, as requests of one caller see them (`of_caller`)."""

    llm: AsyncLLM
    config: ServerConfig
    metrics: EngineMetrics
    model_names: tuple[str, ...]
    pooling_llm: AsyncLLM | None = None
    """The second model, which pools; None where one model is served."""
    pooling_metrics: EngineMetrics | None = None
    """Of the second model's engine."""
    mcp_servers: Mapping[str, MCPServer] = field(default_factory=dict)
    """By label; those that the operator named."""
    started_s: int = field(default_factory=lambda: int(time.time()))
    generating: dict[tuple[str, str], set[str]] = field(default_factory=dict)
    """Owner and id of a request for /inference/v1/generate that runs -> its ids in the engine."""
    state: ServerState = field(default_factory=ServerState)
    caller: Caller = KEYLESS
    """Whose requests are served."""
    data_parallel_rank: int | None = None
    """Rank of the engine that the request's header chooses; None for the one that suits best."""
    inspector: BodyInspector = field(init=False)
    """Refuses bodies with too many values or too large constraints."""
    api_keys: APIKeys = field(init=False)
    usage: UsageBook = field(init=False)
    """What each tenant has used."""
    rate_limiter: RateLimiter = field(init=False)
    """Holds callers to the limits of their keys."""
    fingerprint: str | None = field(init=False, default=None)
    """`system_fingerprint` of answers."""
    io_processor: IOProcessor | None = field(init=False, default=None)
    """Reads and answers what is sent to /pooling for task "plugin"; None without a plug-in."""

    def __post_init__(self) -> None:
        self.api_keys = read_api_keys(self.config)
        self.usage = make_usage_book(self.config) if self.api_keys.num_keys else UsageBook()
        self.rate_limiter = RateLimiter(self.usage, self.api_keys.limits)
        self.state.background.append(self.usage.keep_saving)
        for metrics in (self.metrics, self.pooling_metrics):
            if metrics is not None:
                metrics.on_request_end = self.usage.count
        if self.llm.media is not None:
            self.metrics.prepared_media = self.llm.media.stats
        if self.config.io_processor_plugin is not None:
            self.io_processor = load_io_processor(self.config.io_processor_plugin)(
                self.for_pooling(None).llm.engine.info
            )
        self.fingerprint = fingerprint_of(self.config, self.llm.config, self.llm.engine.info)
        bounds = ValueBounds(self.config.max_body_values, self.config.max_body_objects)
        self.inspector = BodyInspector(self.llm.config.structured_output.max_bytes, bounds)
        self.state.background.append(self.inspector.close_at_end)

    @property
    def modalities(self) -> tuple[str, ...]:
        """Kinds of media that conversations may hold, which are then not told to the model in lines of text. Where the
        operator wants text only of a model that takes more, all kinds: each is refused."""
        if self.llm.config.model.language_model_only:
            return tuple(map(str, (Modality.IMAGE, Modality.VIDEO, Modality.AUDIO)))
        return () if self.llm.media is None else tuple(self.llm.media.placeholders)

    @property
    def pooler(self) -> PoolerSpec:
        """How the model pools. Raises RuntimeError where it does not."""
        if self.llm.pooling_prompts is None:
            raise RuntimeError("the model pools nothing: check its tasks first")
        return self.llm.pooling_prompts.spec

    @property
    def llms(self) -> tuple[AsyncLLM, ...]:
        """All served models, the one that generates first."""
        return (self.llm,) if self.pooling_llm is None else (self.llm, self.pooling_llm)

    @property
    def num_requests(self) -> int:
        """Requests that are being answered, by all models."""
        return sum(llm.engine.num_requests() for llm in self.llms)

    @property
    def pooling_model(self) -> str | None:
        """Name of the second model; None where one model is served."""
        return None if self.pooling_llm is None else self.config.pooling_model

    def for_pooling(self, model: str | None) -> ServerContext:
        """This server with the model that a pooling request runs on: the second one where it is named, and where no
        model is named and the first one pools nothing.

        Args:
            model: `model` of the request.
        """
        name = self.pooling_model
        if self.pooling_llm is None or name is None:
            return self
        if model != name and (model is not None or self.llm.engine.info.pooling_tasks):
            return self
        context = copy.copy(self)
        context.llm, context.model_names, context.pooling_llm = self.pooling_llm, (name,), None
        return context

    def check_awake(self) -> None:
        """Raises HTTPError (503) while the served model sleeps."""
        if self.state.is_asleep:
            raise HTTPError(503, "the server sleeps; wake it with POST /wake_up", code="sleeping")

    def of_caller(self, caller: Caller) -> ServerContext:
        """This server for requests of another caller."""
        context = copy.copy(self)
        context.caller = caller
        return context

    def request_options(self, body: RequestFields, *, streams: bool | None = None) -> RequestOptions:
        """What the engine is told of a caller's request beside its prompt and its sampling: every request of a route
        goes to the engine with these, so that the caller's tenant and salt are never left out.

        Args:
            body: Of the request.
            streams: Whether outputs are wanted as they come; None for what the body says.
        """
        streams = bool(body.stream) if streams is None else streams
        rank: int | None = getattr(body, "data_parallel_rank", None)
        return RequestOptions(
            priority=body.priority,
            cache_salt=self.caller_salt(body.cache_salt),
            adapter=self.adapter_of(body.model),
            tenant=self.caller.tenant,
            client_request_id=current_request_id.get() or None,
            output_kind=OutputKind.DELTA if streams else OutputKind.FINAL_ONLY,
            data_parallel_rank=self.data_parallel_rank if rank is None else rank,
        )

    def caller_salt(self, salt: str | None) -> str | None:
        """The salt of cached prefixes: what the request asks for, and whose it is where there are several keys, so that
        neither `cached_tokens` nor the time tells what others have sent.

        Args:
            salt: `cache_salt` of the request; None for none.
        """
        if self.config.share_prefix_cache or self.api_keys.num_keys < 2:
            return salt
        return f"{self.caller.owner}:{salt or ''}"

    def resolve_model(self, name: str | None) -> str:
        """The name to answer with.

        Raises:
            ModelNotFoundError: another model than the served one was asked for.
        """
        if name is None or name in self.model_names or name in self.adapters:
            return name or self.model_names[0]
        if name == self.pooling_model:
            raise ModelNotFoundError(f"the model {name!r} generates nothing here: it is for pooling (--pooling-model)")
        served = (*self.model_names, *self.adapters)
        raise ModelNotFoundError(
            f"the model {name!r} is not served here; served: {', '.join(repr(each) for each in served)}"
        )

    @property
    def adapters(self) -> dict[str, str]:
        """Name -> name in the engine, of each adapter that the caller may choose: the server's, and its own."""
        own, offered = self.state.own_adapters, self.llm.client.adapters
        shared = {name: name for name in offered if name not in own}
        return shared | {
            own[name].name: name for name in offered if name in own and own[name].owner == self.caller.owner
        }

    def adapter_labels(self, engine_name: str) -> tuple[str, str]:
        """Name and tenant of an adapter in the metrics; the tenant of one that is everybody's is ""."""
        own = self.state.own_adapters.get(engine_name)
        return (engine_name, "") if own is None else (own.name, own.tenant)

    def adapter_of(self, model: str | None) -> str | None:
        """The engine's name of the adapter that a request for this model runs with; None for the network as it is."""
        return None if model is None or model in self.model_names else self.adapters.get(model)

    def is_deterministic(self, params: SamplingParams, model: str) -> bool:
        """Whether a repetition of the request, which was for `model`, is certain to give the same tokens."""
        info = self.llm.engine.info
        may_move = info.merges_adapters and model not in self.model_names
        return info.batch_invariant and params.repeatable and not may_move

    def sampling_params(self, body: SamplingFields) -> SamplingParams:
        """The request's parameters, with the checkpoint's defaults.

        Raises:
            RequestError: naming the field.
        """
        body.check_supported()
        params = body.to_sampling_params(self.llm.generation_defaults)
        self.check_request(params, body.priority)
        return params

    def names_tokens_by_id(self, body: SamplingFields) -> bool:
        """Whether log probabilities name tokens by their ids, not by their texts."""
        return body.return_tokens_as_token_ids or self.config.return_tokens_as_token_ids

    def usage_wanted(self, options: StreamOptions | None) -> tuple[bool, bool]:
        """Whether a stream ends with its usage, and whether each of its events has one."""
        has_usage = self.config.enable_force_include_usage or (options is not None and options.include_usage)
        return has_usage, has_usage and options is not None and options.continuous_usage_stats

    def template_kwargs(self, values: dict[str, Any] | None) -> dict[str, Any] | None:
        """Variables of the chat template: what the request asks for, and for the rest the server's defaults."""
        defaults = self.config.default_chat_template_kwargs
        return {**defaults, **(values or {})} if defaults else values

    def check_request(self, params: SamplingParams, priority: int) -> None:
        """Raises RequestError when this server does not give what is asked for."""
        self.check_priority(priority)
        check_transfer(params, self.llm.engine.info)
        remedy = "ask for fewer (the server's bound is --max-logprobs)"
        check_logprobs(params, self.llm.config.model.max_logprobs, self.llm.engine.info.vocab_size, remedy=remedy)

    def check_priority(self, priority: int) -> None:
        """Raises RequestError when the server has no priorities and one is asked for."""
        if priority and self.llm.config.scheduler.policy != "priority":
            raise RequestError(
                "priority needs a server started with --scheduling-policy priority; leave it out", param="priority"
            )


async def in_thread_when(is_large: bool, work: Callable[[], Result]) -> Result:
    """Run `work` here when it is small, in a worker thread when it is large, so that the event loop goes on."""
    return await asyncio.to_thread(work) if is_large else work()


async def all_of(works: Iterable[Awaitable[Result]]) -> list[Result]:
    """All results in order. When one fails, the others are cancelled, so that nothing runs on for nobody."""
    futures: list[asyncio.Future[Result]] = []
    try:
        for number, work in enumerate(works):
            if number % _STARTED_AT_ONCE == _STARTED_AT_ONCE - 1:
                await asyncio.sleep(0)  # a thousand requests are not sent to the engine in one go
            futures.append(asyncio.ensure_future(work))
        return list(await asyncio.gather(*futures))
    finally:
        for each in futures:
            each.cancel()
        await asyncio.gather(*futures, return_exceptions=True)


async def unless_disconnected(request: Request, work: Awaitable[Result]) -> Result:
    """Wait for `work`, and cancel it when the client goes away. The body must have been read before.

    Raises:
        ClientGoneError: the client closed the connection first.
    """

    async def watch() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    result: asyncio.Future[Result] = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(watch())
    try:
        await asyncio.wait((result, leaving), return_when=asyncio.FIRST_COMPLETED)
        if result.done():
            return result.result()
        raise ClientGoneError
    finally:
        for task in (result, leaving):
            if not task.done():
                task.cancel()
        await asyncio.gather(result, leaving, return_exceptions=True)

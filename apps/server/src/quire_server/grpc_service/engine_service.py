"""vLLM's service `VllmEngine`: generate, embed, abort, and what is served and how busy it is."""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
import time
from collections.abc import AsyncGenerator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from smg_grpc_proto import vllm_engine_pb2 as pb
from smg_grpc_proto import vllm_engine_pb2_grpc
from smg_grpc_proto.generated import common_pb2

from quire import __version__
from quire_engine import RequestOutput
from quire_interfaces import Modality, PoolingParams, QuireError, RenderedPrompt, RequestError
from quire_server.context import ServerContext
from quire_server.errors import HTTPError
from quire_server.grpc_service.calls import RPC, CallWatch, EndlessCalls, answering, caller_of
from quire_server.grpc_service.generation import GeneratedMessages, request_fields, token_params
from quire_server.grpc_service.kv_events import kv_event_batches
from quire_server.grpc_service.tokenizer_archive import TokenizerArchive
from quire_server.readiness import check_ready, refuse_while_draining
from quire_server.token_routes import abort_here, abortable
from quire_server.truncation import truncated
from quire_server.turn import raise_failed
from quire_server.vector_encoding import float_vector

__all__ = ["EngineService"]

CHUNK_BYTES = 64 * 1024
"""Of the tokenizer's archive in one message."""


@dataclass(slots=True)
class _EmbedFields:
    """A request to embed says nothing of its scheduling."""

    model: str | None = None
    priority: int = 0
    cache_salt: str | None = None
    stream: bool | None = None


class EngineService(vllm_engine_pb2_grpc.VllmEngineServicer):  # type: ignore[misc]  # the library has no types
    """Answers for all callers.

    Args:
        context: Of the server; its HTTP routes serve the same.
        endless: Knows who subscribes.
    """

    def __init__(self, context: ServerContext, endless: EndlessCalls) -> None:
        self._context, self._endless = context, endless
        name = pb.DESCRIPTOR.services_by_name["VllmEngine"].full_name
        self.watch = CallWatch(name, context.config, context.state.span_sender, context.model_names[0])
        self._start_s = time.monotonic()
        self._archive = TokenizerArchive(context.llm.folder)

    @answering
    async def Generate(self, request: Any, rpc: RPC) -> None:  # noqa: N802  # names of the protocol
        """Token ids, or a text, to token ids: a message for each step, or one for each completion."""
        context = self._admitted(rpc)
        fields = request_fields(request)
        if context.llm.engine.info.runner == "pooling":
            raise HTTPError(404, f"{context.llm.engine.info.model} generates no text here", code="unsupported_task")
        params = token_params(context.sampling_params(fields))
        kind = request.WhichOneof("input")
        if kind is None:
            raise RequestError("the request has no input: send tokenized or text", param="input")
        if kind == "text":
            prompt = await asyncio.to_thread(context.llm.renderer.render_prompt, request.text)
        else:
            prompt = RenderedPrompt(token_ids=list(request.tokenized.input_ids))
        prompt = truncated(context, prompt, fields.truncate_prompt_tokens, fields.truncation_side, params)
        fields.stream = request.stream
        name = request.request_id or secrets.token_hex(16)
        engine_id = f"{name}/{secrets.token_hex(8)}"
        outputs = context.llm.engine.generate(prompt, params, context.request_options(fields), request_id=engine_id)
        messages = GeneratedMessages(prompt.token_ids, streams=request.stream)
        await self._send(abortable(context, name, engine_id, outputs), messages, rpc)

    async def _send(self, outputs: AsyncGenerator[RequestOutput, None], messages: GeneratedMessages, rpc: RPC) -> None:
        """Send an answer. A client that leaves cancels this call, and so the request."""
        send_timeout_s = self._context.config.send_timeout_s
        async with contextlib.aclosing(outputs) as source:
            async for output in source:
                raise_failed(output)
                for message in messages.of(output):
                    try:
                        async with asyncio.timeout(send_timeout_s):
                            await rpc.write(message)
                    except TimeoutError:
                        raise HTTPError(504, f"the client has read nothing for {send_timeout_s:g} s") from None

    @answering
    async def Embed(self, request: Any, rpc: RPC) -> Any:  # noqa: N802
        """Token ids to one vector."""
        context = self._admitted(rpc).for_pooling(None)
        llm, info = context.llm, context.llm.engine.info
        if "embed" not in info.pooling_tasks or llm.pooling_prompts is None:
            raise HTTPError(404, f"{info.model} embeds nothing here (--runner pooling)", code="unsupported_task")
        token_ids = list(request.tokenized.input_ids)
        prompt = llm.pooling_prompts.render(token_ids, PoolingParams(task="embed"))
        options = context.request_options(_EmbedFields())
        output = await llm.engine.encode(prompt.rendered, prompt.params, prompt.salted(options))
        if output.pooled is None:
            raise output.error or HTTPError(500, "the request failed in the engine", code="generation_failed")
        for each in output.metrics:
            latency_s = each.finished_time_s - each.arrival_time_s
            context.metrics.on_pooled("embed", each.num_prompt_tokens, latency_s)
        vector = float_vector(output.pooled.data)
        return pb.EmbedResponse(embedding=vector, prompt_tokens=output.num_prompt_tokens, embedding_dim=len(vector))

    @answering
    async def Abort(self, request: Any, rpc: RPC) -> Any:  # noqa: N802
        """End what runs of the caller's under these ids. Others are ignored."""
        context = self._called(rpc)
        abort_here(context, context.caller.owner, list(request.request_ids))
        return pb.AbortResponse()

    @answering
    async def HealthCheck(self, request: Any, rpc: RPC) -> Any:  # noqa: N802
        """Whether requests are welcome; needs no key, as GET /ready."""
        try:
            check_ready(self._context)
        except QuireError as error:
            return pb.HealthCheckResponse(healthy=False, message=str(error))
        return pb.HealthCheckResponse(healthy=True, message="ready")

    @answering
    async def GetModelInfo(self, request: Any, rpc: RPC) -> Any:  # noqa: N802
        """What is served."""
        context = self._called(rpc)
        info, llm = context.llm.engine.info, context.llm
        config = await asyncio.to_thread(_read_config, llm.folder)
        return pb.GetModelInfoResponse(
            model_path=info.model,
            tokenizer_path=info.model,
            served_model_name=context.model_names[0],
            is_generation=info.runner != "pooling",
            max_context_length=info.max_model_len,
            max_req_input_len=info.max_model_len - 1,
            vocab_size=info.vocab_size,
            supports_vision=llm.media is not None and Modality.IMAGE in llm.media.placeholders,
            model_type=str(config.get("model_type") or ""),
            architectures=config.get("architectures") or (),
            eos_token_ids=llm.engine.eos_token_ids,
            bos_token_id=_token_id(config.get("bos_token_id")),
            pad_token_id=_token_id(config.get("pad_token_id")),
            default_sampling_params_json=json.dumps(llm.generation_defaults, default=list),
        )

    @answering
    async def GetServerInfo(self, request: Any, rpc: RPC) -> Any:  # noqa: N802
        """How it is served, and how many requests are being answered."""
        context = self._called(rpc)
        info, config = context.llm.engine.info, context.llm.config
        return pb.GetServerInfoResponse(
            active_requests=context.num_requests,
            is_paused=context.state.is_asleep or context.llm.client.is_resting,
            last_receive_timestamp=time.time(),
            uptime_seconds=time.monotonic() - self._start_s,
            server_type="quire-grpc",
            data_parallel_size=config.data_parallel.data_parallel_size,
            kv_cache_dtype=info.kv_cache_dtype,
            block_size=info.block_size,
            model_dtype=info.dtype,
            max_num_seqs=info.max_num_seqs,
        )

    @answering
    async def GetLoads(self, request: Any, rpc: RPC) -> Any:  # noqa: N802
        """Requests that run and wait, and the use of the KV cache, of all engines together."""
        context = self._called(rpc)
        info, stats = context.llm.engine.info, await context.llm.client.stats()
        slots = info.num_blocks * info.block_size
        queried = stats.prefix_cache_query_tokens_total
        load = pb.SchedulerLoad(
            num_running_reqs=stats.num_running,
            num_waiting_reqs=stats.num_waiting,
            num_total_reqs=stats.num_running + stats.num_waiting,
            num_used_tokens=round(stats.kv_cache_usage * slots),
            max_total_num_tokens=slots,
            token_usage=stats.kv_cache_usage,
            cache_hit_rate=stats.prefix_cache_hit_tokens_total / queried if queried else 0.0,
            utilization=stats.num_running / info.max_num_seqs if info.max_num_seqs else 0.0,
            max_running_requests=info.max_num_seqs,
        )
        return pb.GetLoadsResponse(
            timestamp=datetime.now(UTC).isoformat(), version=__version__, dp_rank_count=1, loads=[load]
        )

    @answering
    async def FlushCache(self, request: Any, rpc: RPC) -> Any:  # noqa: N802
        """Forget cached prefixes; for administrators."""
        context = self._administered(rpc, "FlushCache")
        end_s = time.monotonic() + request.timeout_s
        while not (is_done := await context.llm.client.reset_prefix_cache()) and time.monotonic() < end_s:
            await asyncio.sleep(0.05)
        message = "" if is_done else "requests hold blocks of the KV cache: nothing was forgotten; try again"
        return common_pb2.FlushCacheResponse(success=is_done, message=message)

    @answering
    async def GetTokenizer(self, request: Any, rpc: RPC) -> None:  # noqa: N802
        """The files of the tokenizer, as a zip archive in pieces, the last one with its SHA-256."""
        self._called(rpc)
        archive, digest = await asyncio.to_thread(self._archive.read)
        for begin in range(0, len(archive), CHUNK_BYTES):
            is_last = begin + CHUNK_BYTES >= len(archive)
            piece = archive[begin : begin + CHUNK_BYTES]
            await rpc.write(common_pb2.GetTokenizerChunk(data=piece, sha256=digest if is_last else ""))

    @answering
    async def SubscribeKvEvents(self, request: Any, rpc: RPC) -> None:  # noqa: N802
        """What the engine publishes of its KV cache by ZMQ, until the client has enough."""
        context = self._called(rpc)
        config = context.llm.config
        if not config.engine.kv_events.is_published or config.data_parallel.data_parallel_size > 1:
            raise _unsupported("events want --kv-events-config, and one engine (--data-parallel-size 1)")
        batches = kv_event_batches(config.engine.kv_events, request.start_sequence_number)
        with self._endless.running():
            async with contextlib.aclosing(batches) as source:
                async for batch in source:
                    await rpc.write(batch)

    @answering
    async def StartProfile(self, request: Any, rpc: RPC) -> Any:  # noqa: N802
        """Begin to record what all ranks compute, as --profiler-config says; for administrators."""
        context = self._administered(rpc, "StartProfile")
        given = [field.name for field, value in request.ListFields()]
        if given:
            raise HTTPError(400, f"leave {', '.join(given)} out: --profiler-config says what is recorded, and where")
        await context.llm.client.collective_rpc("start_profile", [], {})
        return common_pb2.ProfileResponse(success=True)

    @answering
    async def StopProfile(self, request: Any, rpc: RPC) -> Any:  # noqa: N802
        """End the recording: the message names the files, a line each; for administrators."""
        context = self._administered(rpc, "StopProfile")
        engines = await context.llm.client.collective_rpc("stop_profile", [], {})
        files = [path for ranks in engines for paths in ranks for path in paths]
        return common_pb2.ProfileResponse(success=True, message="\n".join(files))

    def _administered(self, rpc: RPC, name: str) -> ServerContext:
        """The server as an administrator sees it."""
        context = self._called(rpc)
        has_admins = context.api_keys.has_admins
        if not (context.caller.is_admin if has_admins else context.config.enable_admin_routes):
            raise HTTPError(
                403, f"{name} wants --enable-admin-routes, or an administrator's key (--admin-api-key)",
                code="not_an_admin",
            )  # fmt: skip
        return context

    def _called(self, rpc: RPC) -> ServerContext:
        """The server as the caller sees it."""
        return self._context.of_caller(caller_of(self._context, rpc))

    def _admitted(self, rpc: RPC) -> ServerContext:
        """The same, for a request that is to be computed."""
        context = self._called(rpc)
        refuse_while_draining(context)
        context.check_awake()
        context.rate_limiter.admit(context.caller)
        return context


def _unsupported(message: str) -> HTTPError:
    return HTTPError(501, message, code="unsupported")


def _read_config(folder: Path) -> dict[str, Any]:
    """What a checkpoint's config.json says; nothing where there is none, as in a GGUF file."""
    try:
        config: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except OSError:
        return {}
    return config


def _token_id(value: Any) -> int:
    """An id of config.json; some models have several, some none (then 0, as the protocol has nothing else)."""
    return value if isinstance(value, int) else 0

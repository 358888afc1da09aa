"""What SGLang's clients ask of a server: what it serves, whether it works, and to forget, hold or go on."""

from __future__ import annotations

import contextlib

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from quire import __version__
from quire_engine import PauseMode
from quire_interfaces import Modality, OutputKind, RequestError, RequestOptions, SamplingParams
from quire_server.body import read_model
from quire_server.context import ServerContext, in_thread_when
from quire_server.embeddings import as_lists
from quire_server.errors import HTTPError
from quire_server.pooling_call import read_call
from quire_server.pooling_run import Pooled, output_of
from quire_server.responses import json_response
from quire_server.sglang.protocol import SGLangEncodeRequest, SGLangPauseRequest
from quire_server.turn import raise_failed

__all__ = [
    "continue_generation",
    "encode",
    "flush_cache",
    "health_generate",
    "load",
    "model_info",
    "pause_generation",
    "release_memory",
    "resume_memory",
    "server_info",
    "weight_version",
]

WEIGHT_VERSION = "default"
"""Weights do not change while the server runs."""
_PAUSE_MODES: dict[str, PauseMode] = {"abort": "abort", "in_place": "keep", "retract": "keep"}


async def model_info(context: ServerContext, request: Request) -> Response:
    """GET /get_model_info and /model_info: what is served."""
    info = context.llm.engine.info
    media = () if context.llm.media is None else context.llm.media.placeholders
    return json_response(
        {
            "model_path": info.model,
            "tokenizer_path": info.model,
            "served_model_name": context.model_names[0],
            "is_generation": info.runner != "pooling",
            "preferred_sampling_params": None,
            "weight_version": WEIGHT_VERSION,
            "has_image_understanding": Modality.IMAGE in media,
            "has_audio_understanding": Modality.AUDIO in media,
            "max_context_length": info.max_model_len,
        }
    )


async def weight_version(context: ServerContext, request: Request) -> Response:
    """GET /get_weight_version."""
    return json_response({"weight_version": WEIGHT_VERSION})


async def server_info(context: ServerContext, request: Request) -> Response:
    """GET /get_server_info: sizes, and how full it is."""
    config, info = context.llm.config, context.llm.engine.info
    stats = await context.llm.client.stats()
    state = {
        "num_running_reqs": stats.num_running,
        "num_waiting_reqs": stats.num_waiting,
        "token_usage": stats.kv_cache_usage,
    }
    return json_response(
        {
            "model_path": info.model,
            "served_model_name": context.model_names[0],
            "version": f"quire {__version__}",
            "device": info.device,
            "dtype": info.dtype,
            "kv_cache_dtype": info.kv_cache_dtype,
            "context_length": info.max_model_len,
            "page_size": info.block_size,
            "max_total_num_tokens": info.num_blocks * info.block_size,
            "max_running_requests": info.max_num_seqs,
            "max_req_input_len": info.max_model_len - 1,
            "chunked_prefill_size": config.scheduler.max_num_batched_tokens,
            "dp_size": config.data_parallel.data_parallel_size,
            "weight_version": WEIGHT_VERSION,
            "internal_states": [state],
        }
    )


async def load(context: ServerContext, request: Request) -> Response:
    """GET /get_load: requests that run and wait, and tokens in the KV cache."""
    info, stats = context.llm.engine.info, await context.llm.client.stats()
    num_tokens = round(stats.kv_cache_usage * info.num_blocks * info.block_size)
    return json_response(
        [
            {
                "dp_rank": 0,
                "num_reqs": stats.num_running + stats.num_waiting,
                "num_waiting_reqs": stats.num_waiting,
                "num_tokens": num_tokens,
            }
        ]
    )


async def health_generate(context: ServerContext, request: Request) -> Response:
    """GET /health_generate: 200 once the model has made a token, which it is asked for."""
    for llm in context.llms:
        llm.client.check_health()
    info = context.llm.engine.info
    if info.runner == "pooling":
        return Response()
    context.check_awake()
    options = RequestOptions(tenant=context.caller.tenant, output_kind=OutputKind.FINAL_ONLY)
    outputs = context.llm.engine.generate([0], SamplingParams(max_tokens=1, temperature=0, detokenize=False), options)
    async with contextlib.aclosing(outputs):
        raise_failed(await anext(outputs))
    return Response()


async def flush_cache(context: ServerContext, request: Request) -> Response:
    """GET and POST /flush_cache: forget cached prefixes; 400 while requests hold some."""
    if not await context.llm.client.reset_prefix_cache():
        raise HTTPError(400, "requests hold blocks of the KV cache: nothing was forgotten; try again", code="busy")
    return PlainTextResponse("Cache flushed.\n")


async def pause_generation(context: ServerContext, request: Request) -> Response:
    """POST /pause_generation: end what runs (mode abort), or hold it where it is (in_place, retract)."""
    has_body = int(request.headers.get("content-length") or 0) > 0
    body = (
        await read_model(context, request, SGLangPauseRequest, any_content_type=True)
        if has_body
        else SGLangPauseRequest()
    )
    if body.mode not in _PAUSE_MODES:
        raise RequestError(f"mode must be one of {', '.join(_PAUSE_MODES)}, got {body.mode!r}", param="mode")
    await context.llm.client.pause(_PAUSE_MODES[body.mode])
    return json_response({"message": "Generation paused successfully.", "status": "ok"})


async def continue_generation(context: ServerContext, request: Request) -> Response:
    """POST /continue_generation: go on with what was held."""
    await context.llm.client.resume()
    return json_response({"message": "Generation continued successfully.", "status": "ok"})


async def release_memory(context: ServerContext, request: Request) -> Response:
    """POST /release_memory_occupation: sleep, so that the KV cache's memory is given back."""
    _check_sleep_mode(context)
    was_asleep, context.state.is_asleep = context.state.is_asleep, True
    try:
        await context.llm.client.sleep(1)
    except BaseException:
        context.state.is_asleep = was_asleep
        raise
    return json_response({"status": "ok"})


async def resume_memory(context: ServerContext, request: Request) -> Response:
    """POST /resume_memory_occupation: wake up."""
    _check_sleep_mode(context)
    await context.llm.client.wake_up()
    context.state.is_asleep = False
    return json_response({"status": "ok"})


def _check_sleep_mode(context: ServerContext) -> None:
    if not context.config.enable_sleep_mode:
        raise RequestError("this server does not sleep; start it with --enable-sleep-mode", code="unsupported")


async def encode(context: ServerContext, request: Request) -> Response:
    """POST /encode: the vector of a text, or of each of several."""
    call = await read_call(context, request, SGLangEncodeRequest, any_content_type=True)
    inputs, rids = call.body.inputs(), call.body.rids()
    outputs = await call.run(inputs, call.job(call.task("embed")))

    def answer() -> Response:
        answers = [
            _encoded(each, rids[index] if rids and index < len(rids) else call.answer_id(""))
            for index, each in enumerate(outputs)
        ]
        return json_response(answers if call.body.is_several else answers[0])

    return await in_thread_when(call.body.is_large, answer)


def _encoded(pooled: Pooled, name: str) -> dict[str, object]:
    output = output_of(pooled)
    assert output is not None
    assert not isinstance(pooled, Exception)
    info = {"id": name, "finish_reason": None, "prompt_tokens": len(pooled.prompt_token_ids)}
    return {"embedding": as_lists(output), "meta_info": info}

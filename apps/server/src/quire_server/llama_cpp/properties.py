"""GET /props, /slots and /lora-adapters, POST /apply-template, /embedding and /embeddings, as llama.cpp gives them."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from quire import __version__
from quire_interfaces import Modality, RequestError, SamplingParams
from quire_server.body import read_model
from quire_server.chat import chat_turn
from quire_server.context import ServerContext, in_thread_when
from quire_server.errors import HTTPError, naming_fields
from quire_server.llama_cpp.answers import generation_settings
from quire_server.llama_cpp.protocol import LlamaEmbeddingRequest
from quire_server.pooling_call import read_call
from quire_server.pooling_run import output_of
from quire_server.protocol import ChatCompletionRequest
from quire_server.responses import json_response
from quire_server.turn import render_turn
from quire_server.vector_encoding import float_matrix, float_vector

__all__ = [
    "adapters",
    "apply_template",
    "change_slot",
    "embedding",
    "health",
    "props",
    "set_adapters",
    "set_props",
    "slots",
]

LARGEST_INTEGER = 32760.0
"""With embd_normalize 0, the largest number of a vector becomes this: vectors of 16-bit integers, as llama.cpp has."""


async def health(context: ServerContext, request: Request) -> Response:
    """GET /v1/health, llama.cpp's other name of /health, with a body."""
    for llm in context.llms:
        llm.client.check_health()
    return json_response({"status": "ok"})


async def props(context: ServerContext, request: Request) -> Response:
    """GET /props: what is served, and what requests that say nothing are computed with."""
    llm, info = context.llm, context.llm.engine.info
    settings = llm.renderer.tokenizer_config
    template = settings.get("chat_template")
    media = () if llm.media is None else llm.media.placeholders
    form = llm.renderer.chat_format
    params = SamplingParams(**llm.generation_defaults)
    defaults = generation_settings(params, n_ctx=info.max_model_len, model=context.model_names[0], stream=True)
    return json_response(
        {
            "default_generation_settings": {
                "id": 0,
                "id_task": -1,
                "n_ctx": info.max_model_len,
                "speculative": False,
                "is_processing": False,
                "params": defaults,
            },
            "total_slots": info.max_num_seqs,
            "model_alias": context.model_names[0],
            "model_path": info.model,
            "chat_template": template if isinstance(template, str) else "",
            "chat_template_caps": {
                "supports_tools": form.tools is not None,
                "supports_tool_calls": form.tools is not None,
                "supports_preserve_reasoning": form.reasoning is not None,
            },
            "modalities": {"vision": Modality.IMAGE in media, "audio": Modality.AUDIO in media},
            "bos_token": _token(settings.get("bos_token")),
            "eos_token": _token(settings.get("eos_token")),
            "build_info": f"quire {__version__}",
            "is_sleeping": context.state.is_asleep,
        }
    )


def _token(value: Any) -> str:
    return str(value.get("content", "")) if isinstance(value, dict) else str(value or "")


async def set_props(context: ServerContext, request: Request) -> Response:
    """POST /props: refused."""
    raise RequestError("properties are the server's settings, which do not change while it runs", code="unsupported")


async def slots(context: ServerContext, request: Request) -> Response:
    """GET /slots: as many as requests run at a time. Requests have no slot of their own: those that are busy are as
    many as requests run, and come first. With `?fail_on_no_slot=1`, 503 where all are."""
    info = context.llm.engine.info
    stats = await context.llm.client.stats()
    num_busy = min(info.max_num_seqs, stats.num_running)
    if request.query_params.get("fail_on_no_slot", "0") not in ("0", "false") and num_busy == info.max_num_seqs:
        raise HTTPError(503, "no slot available", code="no_slot")
    return json_response(
        [
            {
                "id": index,
                "id_task": -1,
                "n_ctx": info.max_model_len,
                "speculative": False,
                "is_processing": index < num_busy,
            }
            for index in range(info.max_num_seqs)
        ]
    )


async def change_slot(context: ServerContext, request: Request) -> Response:
    """POST /slots/{id_slot}?action=...: refused."""
    raise RequestError(
        "there are no slots to save, restore or erase: prefixes are cached for all requests, kept on disk with "
        "--kv-disk-path, and forgotten with POST /reset_prefix_cache",
        param="action",
        code="unsupported",
    )


async def adapters(context: ServerContext, request: Request) -> Response:
    """GET /lora-adapters: those that a request may choose, by `lora` or as its model. None is applied by itself."""
    offered = context.llm.client.adapters
    return json_response(
        [
            {"id": index, "path": offered[own], "scale": 0.0, "name": name}
            for index, (name, own) in enumerate(context.adapters.items())
        ]
    )


async def set_adapters(context: ServerContext, request: Request) -> Response:
    """POST /lora-adapters: refused."""
    raise RequestError(
        "adapters are not applied to all requests: each request chooses one, by `lora` ([{'id': 0, 'scale': 1}]) or as "
        "its model",
        param="scale",
        code="unsupported",
    )


async def apply_template(context: ServerContext, request: Request) -> Response:
    """POST /apply-template: a conversation, with all that a chat completion may say of it, as its prompt's text."""
    body = await read_model(context, request, ChatCompletionRequest, any_content_type=True)
    context.resolve_model(body.model)
    with naming_fields(body.field_names()):
        prompt = await render_turn(context, lambda: chat_turn(context, body), is_large=body.is_large)
    text = prompt.text
    if text is None:
        text = context.llm.renderer.tokenizer.decode(prompt.token_ids, skip_special_tokens=False)
    return json_response({"prompt": text})


async def embedding(context: ServerContext, request: Request) -> Response:
    """POST /embedding and /embeddings: per text a list with its vector, or with one for each token."""
    call = await read_call(context, request, LlamaEmbeddingRequest, any_content_type=True)
    norm = call.body.embd_normalize
    outputs = await call.run(call.body.inputs(), call.job(call.task("embed", "token_embed")))

    def answer() -> Response:
        items = []
        for index, each in enumerate(outputs):
            output = output_of(each)
            assert output is not None
            is_pooled = len(output.shape) == 1
            rows = [float_vector(output.data)] if is_pooled else float_matrix(output.data, output.shape[1])
            items.append({"index": index, "embedding": [_normalized(row, norm) for row in rows]})
        return json_response(items)

    return await in_thread_when(call.body.is_large, answer)


def _normalized(vector: list[float], norm: int) -> list[float]:
    """By the largest number (0), the sum of numbers (1), or a root of the sum of their powers (above 2); the engine
    has done the rest."""
    if norm < 0 or norm == 2:
        return vector
    if norm == 0:
        size = max(map(abs, vector), default=0.0) / LARGEST_INTEGER
    else:
        size = sum(abs(number) ** norm for number in vector) ** (1.0 / norm)
    return [number / size for number in vector] if size else vector

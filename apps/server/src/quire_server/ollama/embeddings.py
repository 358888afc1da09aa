"""POST /api/embed and /api/embeddings: texts to vectors."""

from __future__ import annotations

import time

from starlette.requests import Request
from starlette.responses import Response

from quire_server.body import read_model
from quire_server.context import ServerContext, in_thread_when
from quire_server.embeddings import as_lists
from quire_server.ollama.names import own_name
from quire_server.ollama.protocol import OllamaEmbeddingsRequest, OllamaEmbedRequest, keep_alive_s
from quire_server.pooling_call import call_of
from quire_server.pooling_protocol import PoolingInput
from quire_server.pooling_run import output_of, usage_of
from quire_server.responses import json_response

__all__ = ["embed", "embeddings"]


async def embed(context: ServerContext, request: Request) -> Response:
    """POST /api/embed: a vector of length 1 per text. No text at all only asks for the model to be there."""
    start_s = time.monotonic()
    body = await read_model(context, request, OllamaEmbedRequest, any_content_type=True)
    keep_alive_s(body.keep_alive)
    asked, body.model = body.model, own_name(context, body.model)
    call = call_of(context, request, body)
    texts = body.inputs()
    outputs = await call.run(texts, call.job(call.task("embed"))) if texts else []

    def answer() -> Response:
        vectors = [as_lists(output) for each in outputs if (output := output_of(each)) is not None]
        return json_response(
            {
                "model": asked or call.model,
                "embeddings": vectors,
                "total_duration": round((time.monotonic() - start_s) * 1e9),
                "load_duration": 0,
                "prompt_eval_count": usage_of(outputs).prompt_tokens,
            }
        )

    return await in_thread_when(body.is_large, answer)


async def embeddings(context: ServerContext, request: Request) -> Response:
    """POST /api/embeddings: the vector of one text, as the model gives it."""
    body = await read_model(context, request, OllamaEmbeddingsRequest, any_content_type=True)
    keep_alive_s(body.keep_alive)
    body.model = own_name(context, body.model)
    call = call_of(context, request, body)
    job = call.job(call.task("embed"))
    outputs = await call.run([PoolingInput("prompt", prompt=body.prompt)], job) if body.prompt else []
    vector = output_of(outputs[0]) if outputs else None
    return json_response({"embedding": [] if vector is None else as_lists(vector)})

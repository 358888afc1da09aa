"""POST /v2/embed and /v1/embed, in Cohere's shapes. Reranking is in `scoring`."""

from __future__ import annotations

import dataclasses

from msgspec import UNSET
from starlette.requests import Request
from starlette.responses import Response

from quire_server.cohere_protocol import CohereEmbeddings, CohereEmbedRequest, CohereMeta, vectors_by_type
from quire_server.context import ServerContext, in_thread_when
from quire_server.pooling_call import read_call
from quire_server.pooling_run import item_error, output_of, usage_of
from quire_server.responses import json_response

__all__ = ["cohere_embed"]


async def cohere_embed(context: ServerContext, request: Request) -> Response:
    """POST /v2/embed and /v1/embed: texts, images or mixtures of both to vectors, in each of several forms."""
    call = await read_call(context, request, CohereEmbedRequest)
    body = call.body
    job = call.job(call.task("embed"))
    pooler = call.context.pooler
    name = body.prompt_name(pooler.prompts)
    job.prompt_options["prompt_name"] = name
    if name in pooler.embedding_tasks and pooler.merged_task is None:
        job.params = dataclasses.replace(job.params, embedding_task=name)
    job.check = lambda param, prompt: body.check_length(param, len(prompt.token_ids))
    outputs = await call.run(body.prompts(), job)
    version = "1" if request.url.path.endswith("/v1/embed") else "2"
    answer_id = call.answer_id("embd-")

    def answer() -> Response:
        vectors = [None if (output := output_of(each)) is None else output.data for each in outputs]
        forms = vectors_by_type(vectors, body.embedding_types or ["float"])
        is_floats = version == "1" and body.embedding_types is None
        return json_response(
            CohereEmbeddings(
                id=answer_id,
                embeddings=forms["float"] if is_floats else forms,
                texts=body.texts or [],
                meta=CohereMeta.of(version, usage_of(outputs).prompt_tokens, has_images=body.has_images),
                response_type="embeddings_floats" if is_floats else "embeddings_by_type",
                errors=[item_error(each) or None for each in outputs] if job.per_item else UNSET,
            )
        )

    return await in_thread_when(body.is_large, answer)

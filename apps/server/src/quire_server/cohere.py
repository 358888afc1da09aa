"""POST /v2/embed and /v1/embed, in Cohere's shapes. Reranking is in `scoring`."""

from __future__ import annotations

from msgspec import UNSET
from starlette.requests import Request
from starlette.responses import Response

from quire_server.body import read_model
from quire_server.cohere_protocol import CohereEmbeddings, CohereEmbedRequest, CohereMeta, vectors_by_type
from quire_server.context import ServerContext, in_thread_when
from quire_server.pooling_run import PoolingJob, item_error, output_of, pool_items, task_of, usage_of
from quire_server.request_ids import answer_id
from quire_server.responses import json_response

__all__ = ["cohere_embed"]


async def cohere_embed(context: ServerContext, request: Request) -> Response:
    """POST /v2/embed and /v1/embed: texts, images or mixtures of both to vectors, in each of several forms."""
    body = await read_model(context, request, CohereEmbedRequest)
    context = context.for_pooling(body.model)
    context.resolve_model(body.model)
    body.check_supported()
    job = PoolingJob.of(context, body, task_of(context, "embed"))
    job.params, job.prompt_name = body.embed_params(), body.prompt_name(context.pooler.prompts)
    job.check = lambda param, prompt: body.check_length(param, len(prompt.token_ids))
    outputs = await pool_items(context, request, [(each, None) for each in body.prompts()], job)
    version = "1" if request.url.path.endswith("/v1/embed") else "2"
    name = answer_id(request, "embd-", body.request_id)

    def answer() -> Response:
        vectors = [None if (output := output_of(each)) is None else output.data for each in outputs]
        forms = vectors_by_type(vectors, body.embedding_types or ["float"])
        is_floats = version == "1" and body.embedding_types is None
        return json_response(
            CohereEmbeddings(
                id=name,
                embeddings=forms["float"] if is_floats else forms,
                texts=body.texts or [],
                meta=CohereMeta.of(version, usage_of(outputs).prompt_tokens),
                response_type="embeddings_floats" if is_floats else "embeddings_by_type",
                errors=[item_error(each) or None for each in outputs] if job.per_item else UNSET,
            )
        )

    return await in_thread_when(body.is_large, answer)

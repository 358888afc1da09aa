"""Embeddings of texts that are parts of one (`late_chunking`), and prompts by what texts are (`input_type`)."""

from __future__ import annotations

import dataclasses

from quire.pooling.late_chunking import join_chunks, split_vectors
from quire_interfaces import QuireError
from quire_server.context import in_thread_when
from quire_server.input_types import prompt_of_input_type
from quire_server.pooling_call import PoolingCall
from quire_server.pooling_protocol import EmbeddingRequest, PoolingInput, PoolingRequest
from quire_server.pooling_run import Pooled, PoolingJob

__all__ = ["late_chunks", "named_prompts"]


def named_prompts(call: PoolingCall[EmbeddingRequest] | PoolingCall[PoolingRequest], job: PoolingJob) -> PoolingJob:
    """The job with the prompt that `input_type` stands for. Raises RequestError where there is none."""
    if call.body.input_type is not None:
        pooler = call.context.pooler
        job.prompt_options["prompt_name"] = prompt_of_input_type(
            call.body.input_type, pooler.prompts, is_late_interaction=pooler.late_interaction is not None
        )
    return job


async def late_chunks(call: PoolingCall[EmbeddingRequest], job: PoolingJob) -> list[Pooled]:
    """What comes of each text of the request, which are read as one. The first has the tokens that all cost.

    Raises:
        QuireError: as `pool_items` does; the model does not embed by the mean of tokens, or a text has no tokens.
    """
    inputs = call.body.inputs()
    context = call.context
    prompts = context.llm.pooling_prompts
    assert prompts is not None
    chunks = [each.prompt for each in inputs if each.prompt is not None]
    token_ids, job.params = await in_thread_when(
        job.is_large,
        lambda: join_chunks(
            context.llm.renderer.tokenizer,
            chunks,
            job.params,
            prompts.instruction(job.prompt_options.get("prompt_name")),
        ),
    )
    (pooled,) = await call.run([PoolingInput("input", prompt=token_ids)], job)
    if isinstance(pooled, QuireError) or pooled.pooled is None:
        return [pooled] * len(inputs)
    vectors = split_vectors(pooled.pooled)
    first = dataclasses.replace(pooled, pooled=vectors[0])
    return [
        first,
        *(
            dataclasses.replace(pooled, pooled=each, packed_token_ids=b"", metrics=[], num_cached_tokens=0)
            for each in vectors[1:]
        ),
    ]

"""One request to a pooling route: its body, the model that it is for, what that computes, and an answer with a list."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from quire_interfaces import PoolingTask
from quire_server.body import read_model
from quire_server.context import ServerContext, in_thread_when
from quire_server.errors import HTTPError
from quire_server.list_parts import list_parts, num_answer_bytes
from quire_server.pooling_answers import PoolingAnswer
from quire_server.pooling_protocol import CommonFields, PoolingFields, PoolingInput
from quire_server.pooling_run import Pooled, PoolingItem, PoolingJob, pool_items, usage_of
from quire_server.request_ids import answer_id
from quire_server.responses import json_response

__all__ = ["PoolingCall", "call_of", "read_call"]

Fields = TypeVar("Fields", bound=CommonFields)
_STREAMED_BYTES = 1 << 21
"""Of vectors as float32, from which on an answer is sent in parts: as text it has five times as many."""


@dataclass(slots=True, frozen=True)
class PoolingCall(Generic[Fields]):
    """A checked request."""

    context: ServerContext
    """The server, with the model that the request is for."""
    request: Request
    body: Fields
    model: str
    """Name to answer with."""

    def task(self, *tasks: PoolingTask) -> PoolingTask:
        """The first of the tasks that the served model has.

        Raises:
            HTTPError: 404, it has none of them; the message says how a server has.
        """
        info = self.context.llm.engine.info
        for task in tasks:
            if task in info.pooling_tasks:
                return task
        does = f"its tasks are {', '.join(info.pooling_tasks)}" if info.pooling_tasks else "it generates text"
        model, conversion = _REMEDIES.get(tasks[0], ("another model", ""))
        raise HTTPError(
            404,
            f"this route needs the pooling task {tasks[0]!r}, which {info.model} does not have: {does}; serve {model} "
            f"(--runner pooling){conversion}",
            code="unsupported_task",
        )

    def job(self, task: PoolingTask | None) -> PoolingJob:
        """What is asked of every item. Raises RequestError naming the field at fault."""
        return PoolingJob.of(self.context, self.body, task)

    async def run(self, items: Sequence[PoolingInput | PoolingItem], job: PoolingJob) -> list[Pooled]:
        """What comes of texts or pairs of them. Raises as `pool_items` does."""
        pairs = [each if isinstance(each, tuple) else (each, None) for each in items]
        return await pool_items(self.context, self.request, pairs, job)

    def answer_id(self, prefix: str) -> str:
        """Id of the answer: the one that the client chose, or the request's, behind a prefix."""
        chosen = self.body.request_id if isinstance(self.body, PoolingFields) else None
        return answer_id(self.request, prefix, chosen)

    async def list_answer(self, prefix: str, outputs: Sequence[Pooled], items: Callable[[], Iterator[Any]]) -> Response:
        """An object per item, with the tokens that all of them cost.

        Args:
            prefix: Of the answer's id.
            outputs: What was computed.
            items: Makes the objects one by one, in a worker thread where the body is large.
        """

        name = self.answer_id(prefix)
        whole = PoolingAnswer[Any](
            id=name, created=int(time.time()), model=self.model, data=[], usage=usage_of(outputs)
        )
        if num_answer_bytes(outputs) > _STREAMED_BYTES:
            return StreamingResponse(list_parts(whole, items()), media_type="application/json")

        def answer() -> Response:
            whole.data = list(items())
            return json_response(whole)

        return await in_thread_when(self.body.is_large, answer)


async def read_call(
    context: ServerContext, request: Request, kind: type[Fields], *, any_content_type: bool = False
) -> PoolingCall[Fields]:
    """The request, with the model that it names.

    Args:
        context: Of the server.
        request: Whose body is read.
        kind: Its model.
        any_content_type: As for `read_body`.

    Raises:
        HTTPError: the model sleeps, or as `read_model`.
        RequestError: the body is wrong, another model is asked for, or something that is not served.
    """
    return call_of(context, request, await read_model(context, request, kind, any_content_type=any_content_type))


def call_of(context: ServerContext, request: Request, body: Fields) -> PoolingCall[Fields]:
    """The request of a body, with the model that it names.

    Raises:
        HTTPError: the model sleeps.
        RequestError: another model is asked for, or something that is not served.
    """
    chosen = context.for_pooling(body.model)
    if chosen is context:
        context.check_awake()
    model = chosen.resolve_model(body.model)
    body.check_supported()
    return PoolingCall(chosen, request, body, model)


_EMBED = ("an embedding model", ", or make one of this model (--convert embed)")
_CLASSIFY = ("a model with classes", ", or make one of this model (--convert classify)")
_RERANK = ("a reranking or embedding model", ", or make one of this model (--convert classify or embed)")
_REMEDIES: dict[str, tuple[str, str]] = {
    "embed": _EMBED,
    "token_embed": _EMBED,
    "classify": _CLASSIFY,
    "token_classify": _CLASSIFY,
    "score": _RERANK,
}
"""Task -> a model that has it, and how another one gets it."""

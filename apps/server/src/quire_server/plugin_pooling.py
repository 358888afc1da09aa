"""POST /pooling with `data`: an IO-processor plug-in reads it, and writes the answer."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any, TypeVar

from starlette.responses import Response

from quire.pooling.outputs import PoolingRequestOutput
from quire_interfaces import QuireError, RequestError
from quire_server.pooling_answers import PluginAnswer
from quire_server.pooling_call import PoolingCall
from quire_server.pooling_protocol import PoolingInput, PoolingRequest
from quire_server.pooling_run import PoolingItem
from quire_server.responses import json_response

__all__ = ["plugin_pooling"]

Result = TypeVar("Result")


async def plugin_pooling(call: PoolingCall[PoolingRequest]) -> Response:
    """What the plug-in makes of the body.

    Raises:
        RequestError: no plug-in runs here, it refuses the data, or the body holds prompts beside the data.
        QuireError: as `pool_items` does; a prompt is named as "data[0]".
    """
    body, processor = call.body, call.context.io_processor
    if processor is None:
        raise RequestError(
            "No IOProcessor plugin installed. Start the server with --io-processor-plugin",
            param="task",
            code="unsupported",
        )
    if body.input is not None or body.messages is not None:
        name = "messages" if body.input is None else "input"
        raise RequestError(f"a plug-in makes its prompts of data: leave {name} out", param=name)
    data = await _asked(lambda: processor.parse_data(body.data))
    prompts = await _asked(lambda: list(processor.pre_process(data)))
    job = call.job(None)
    job.params = await _asked(lambda: processor.pooling_params(data, job.params))
    job.is_large, job.per_item = True, False
    outputs = await call.run([_item(index, each) for index, each in enumerate(prompts)], job)
    results: list[PoolingRequestOutput[Any]] = [
        PoolingRequestOutput(each) for each in outputs if not isinstance(each, QuireError)
    ]
    answer = await asyncio.to_thread(processor.post_process, data, results)
    return json_response(PluginAnswer(request_id=call.answer_id("pool-"), created_at=int(time.time()), data=answer))


async def _asked(work: Callable[[], Result]) -> Result:
    """The plug-in's word on a request's data."""
    try:
        return await asyncio.to_thread(work)
    except (ValueError, TypeError) as error:
        raise RequestError(f"data: {error}", param="data") from error


def _item(index: int, prompt: Any) -> PoolingItem:
    param = f"data[{index}]"
    if isinstance(prompt, tuple):
        first, second = prompt
        return PoolingInput(param, prompt=first), PoolingInput(param, prompt=second)
    return PoolingInput(param, prompt=prompt), None

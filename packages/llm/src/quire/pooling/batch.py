"""Many pooling requests at once through an engine of a process of its own: so many of them at a time as fill its steps.

Knows no prompts in other forms than rendered ones.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from quire.pooling.prompts import PoolingPrompt
from quire_engine import AsyncEngine, EngineInfo, PooledRequestOutput
from quire_interfaces import QuireError, RequestOptions

__all__ = ["num_in_flight", "pool_batch"]

WINDOW_STEPS = 2
"""Requests in the engine at a time, in steps of `max_num_seqs` requests."""


def num_in_flight(info: EngineInfo) -> int:
    """Most requests of one call that are in the engine at a time: one step of them runs while another waits, and other
    callers find room."""
    return WINDOW_STEPS * info.max_num_seqs


async def pool_batch(
    engine: AsyncEngine,
    count: int,
    prompt_of: Callable[[int], Awaitable[PoolingPrompt]],
    options: RequestOptions,
    on_error: Callable[[int, QuireError], QuireError],
) -> list[PooledRequestOutput | QuireError]:
    """The outputs of `count` prompts, in order. Cancelling the call drops all of them.

    Args:
        engine: Runs them.
        count: Number of prompts.
        prompt_of: Renders the prompt of a place, when it is its turn; may raise.
        options: Of all of them; the salt of a prompt goes before theirs.
        on_error: Called with the place and the error of each prompt that fails. What it returns stands in the place of
            the output; what it raises ends the call, and drops the others.

    Returns:
        Outputs without an error, or what `on_error` returned.

    Raises:
        QuireError: by `on_error`.
    """
    outputs: dict[int, PooledRequestOutput | QuireError] = {}
    places = iter(range(count))

    async def work() -> None:
        for place in places:
            try:
                prompt = await prompt_of(place)
                try:
                    output = await engine.encode(prompt.rendered, prompt.params, prompt.salted(options))
                finally:
                    prompt.release()
                outputs[place] = output
                if output.error is not None:
                    raise output.error
            except QuireError as error:
                outputs[place] = on_error(place, error)

    workers = [asyncio.ensure_future(work()) for _ in range(min(num_in_flight(engine.info), count))]
    try:
        await asyncio.gather(*workers)
    finally:  # when one fails, the others have nobody to run for
        for worker in workers:
            worker.cancel()
        await asyncio.gather(*workers, return_exceptions=True)
    return [outputs[place] for place in range(count)]

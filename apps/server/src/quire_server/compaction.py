"""Compaction: the model summarizes a conversation, and goes on from the summary alone.

Three ways lead here: `/v1/responses/compact`, an item `compaction_trigger`, and `context_management` with a threshold.
A conversation that does not fit the context with room for a summary loses its oldest parts first. Knows no items.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from quire_interfaces import ContextLengthError
from quire_server.context import ServerContext
from quire_server.errors import HTTPError
from quire_server.responses_request import CompactRequest
from quire_server.turn import ChatTurn, RunningTurn, start_turn

__all__ = ["naming_full_context", "start_summary", "summary_of"]

SUMMARIZE = (
    "Summarize the conversation so far for yourself, so that you can go on from the summary alone. "
    "Keep names, numbers, decisions, results of tools and what is still to be done."
)
_ROOM_SHARE, _MAX_ROOM_TOKENS = 8, 2048
"""Room that is kept for a summary: a share of the context, up to a number of tokens."""
_MAX_SHORTENINGS = 24


async def start_summary(
    context: ServerContext, body: CompactRequest, messages: Sequence[dict[str, Any]], *, stream: bool = False
) -> RunningTurn:
    """The turn in which the model summarizes these messages.

    Raises:
        RequestError: naming the field at fault.
        ContextLengthError: not even the instructions and one message fit.
    """
    params = replace(context.sampling_params(body), structured_outputs=None, logprobs=None)
    kwargs = {"enable_thinking": False, "thinking": False, **(getattr(body, "chat_template_kwargs", None) or {})}
    limit = context.llm.engine.info.max_model_len
    room = min(_MAX_ROOM_TOKENS, limit // _ROOM_SHARE, params.max_tokens or limit)
    conversation = list(messages)
    for _ in range(_MAX_SHORTENINGS):
        make_turn = functools.partial(
            ChatTurn,
            messages=[*conversation, {"role": "user", "content": SUMMARIZE}],
            params=params,
            chat_template_kwargs=context.template_kwargs(kwargs),
            fills_context=True,
            options=context.request_options(body, streams=stream),
        )
        shorter = _shortened(conversation)
        try:
            running = await start_turn(context, make_turn, is_large=True)
        except ContextLengthError:
            if shorter is None:
                raise
        else:
            if shorter is None or len(running.prompt.token_ids) + room <= limit:
                return running
            await running.outputs.aclose()
        conversation = shorter
    raise ContextLengthError("the conversation cannot be made short enough to be summarized; send less of it")


def _shortened(messages: list[dict[str, Any]]) -> list[dict[str, Any]] | None:
    """Without the older half of what is no instruction; of a single message without its older half. None where nothing
    is left to leave out."""
    head = next((index for index, each in enumerate(messages) if each["role"] not in _INSTRUCTIONS), len(messages))
    instructions, rest = messages[:head], messages[head:]
    if len(rest) > 1:
        newer = rest[len(rest) // 2 :]
        first = next((index for index, each in enumerate(newer) if each["role"] != "tool"), len(newer) - 1)
        return [*instructions, *newer[first:]]  # no result without its call
    text = str(rest[0].get("content") or "") if rest else ""
    if len(text) < 2:
        return None
    return [*instructions, {"role": "user", "content": text[len(text) // 2 :]}]


@contextlib.contextmanager
def naming_full_context() -> Iterator[None]:
    """Say of a full context what clients of the Responses API look for, before what this server says of it."""
    try:
        yield
    except ContextLengthError as error:
        if error.code == "context_length_exceeded" and error.param not in ("max_output_tokens", "max_tokens"):
            words = "Your input exceeds the context window of this model. Please adjust your input and try again."
            error.args = (f"{words} ({error})", *error.args[1:])
        raise


_INSTRUCTIONS = ("system", "developer")


def summary_of(running: RunningTurn) -> str:
    """What the model wrote; its thoughts where it wrote nothing else.

    Raises:
        HTTPError: it wrote nothing at all.
    """
    message = running.choices[0].message()
    text = message.text.strip() or message.reasoning.strip()
    if not text:
        raise HTTPError(500, "the model gave no summary", code="compaction_failed")
    return text

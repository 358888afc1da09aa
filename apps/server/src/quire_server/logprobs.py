"""Log probabilities in the shapes of the two OpenAI APIs and of vLLM's prompt_logprobs."""

from __future__ import annotations

from typing import Any

from quire_engine import CompletionOutput, Logprob
from quire_server.responses import ChatLogprobs, ChatTokenLogprob, CompletionLogprobs, TopLogprob

__all__ = ["chat_logprobs", "completion_logprobs", "prompt_logprobs"]

LOWEST = -9999.0
"""Stands for minus infinity, which JSON does not have."""


def chat_logprobs(output: CompletionOutput) -> ChatLogprobs | None:
    """For chat completions: per token the chosen one and the most likely ones."""
    if output.logprobs is None:
        return None
    return ChatLogprobs([_chat_token(candidates) for candidates in output.logprobs])


def _chat_token(candidates: list[Logprob]) -> ChatTokenLogprob:
    chosen, *top = candidates
    return ChatTokenLogprob(
        chosen.decoded_token,
        max(chosen.logprob, LOWEST),
        list(chosen.token_bytes),
        [TopLogprob(each.decoded_token, max(each.logprob, LOWEST), list(each.token_bytes)) for each in top],
    )


def completion_logprobs(
    output: CompletionOutput,
    *,
    text_offset: int = 0,
    echoed: list[list[Logprob] | None] | None = None,
    echoed_tokens: list[str] | None = None,
) -> CompletionLogprobs | None:
    """For completions: parallel lists.

    Args:
        output: A delta or a whole completion.
        text_offset: Where the output begins in the returned text.
        echoed: Log probabilities of the prompt's tokens, which come first when the prompt is echoed.
        echoed_tokens: Their texts.
    """
    if output.logprobs is None:
        return None
    result = CompletionLogprobs([], [], [], [])
    place = 0
    for candidates, text in zip(echoed or [], echoed_tokens or [], strict=True):
        result.text_offset.append(place)
        result.tokens.append(text)
        result.token_logprobs.append(None if candidates is None else max(candidates[0].logprob, LOWEST))
        result.top_logprobs.append(None if candidates is None else _by_text(candidates))
        place += len(text)
    for candidates, offset in zip(output.logprobs, output.text_offsets, strict=False):
        result.text_offset.append(text_offset + offset)
        result.tokens.append(candidates[0].decoded_token)
        result.token_logprobs.append(max(candidates[0].logprob, LOWEST))
        result.top_logprobs.append(_by_text(candidates))
    return result


def _by_text(candidates: list[Logprob]) -> dict[str, float]:
    # Several ids may have one text; the most likely of them counts, and the chosen token is always there.
    result: dict[str, float] = {}
    for each in (*candidates[1:], candidates[0]):
        result.setdefault(each.decoded_token, max(each.logprob, LOWEST))
    return result


def prompt_logprobs(positions: list[list[Logprob] | None]) -> list[dict[str, Any] | None]:
    """vLLM's shape: per prompt token, token id -> logprob, rank and text; None for the first."""
    return [
        None
        if candidates is None
        else {
            str(each.token_id): {
                "logprob": max(each.logprob, LOWEST),
                "rank": each.rank,
                "decoded_token": each.decoded_token,
            }
            for each in candidates
        }
        for candidates in positions
    ]

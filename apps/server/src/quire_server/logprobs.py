"""Log probabilities in the shapes of the two OpenAI APIs and of vLLM's prompt_logprobs."""

from __future__ import annotations

import struct
from base64 import b64encode
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from quire_engine import CompletionOutput, Logprob
from quire_interfaces import Tokenizer
from quire_renderers import IncrementalDetokenizer
from quire_server.responses import ChatLogprobs, ChatTokenLogprob, CompletionLogprobs, PackedLogprobs, TopLogprob

__all__ = ["EchoedTokens", "chat_logprobs", "completion_logprobs", "id_as_text", "prompt_logprobs"]

LOWEST = -9999.0
"""Stands for minus infinity, which JSON does not have."""


def id_as_text(token_id: int) -> str:
    """A token's name where clients ask for ids (`return_tokens_as_token_ids`): no two tokens share one."""
    return f"token_id:{token_id}"


def _name(token: Logprob, as_ids: bool) -> str:
    return id_as_text(token.token_id) if as_ids else token.decoded_token


def chat_logprobs(output: CompletionOutput, *, as_ids: bool = False) -> ChatLogprobs | None:
    """For chat completions: per token the chosen one and the most likely ones, named by their texts or their ids."""
    if output.logprobs is None:
        return None
    return ChatLogprobs([_chat_token(candidates, as_ids) for candidates in output.logprobs])


def _chat_token(candidates: list[Logprob], as_ids: bool) -> ChatTokenLogprob:
    sampled, *top = candidates
    return ChatTokenLogprob(
        _name(sampled, as_ids),
        max(sampled.logprob, LOWEST),
        list(sampled.token_bytes),
        [TopLogprob(_name(each, as_ids), max(each.logprob, LOWEST), list(each.token_bytes)) for each in top],
    )


@dataclass(frozen=True, slots=True)
class EchoedTokens:
    """The tokens of a prompt that an answer repeats."""

    names: list[str]
    offsets: list[int]
    """Where the text of each begins in the prompt's."""
    logprobs: list[list[Logprob] | None]

    @classmethod
    def of(
        cls,
        tokenizer: Tokenizer,
        token_ids: Sequence[int],
        text: str,
        logprobs: list[list[Logprob] | None],
        *,
        as_ids: bool,
    ) -> EchoedTokens:
        """The tokens of `text`. Those that the tokenizer put around it have no place in it: they stand at its ends."""
        names = [id_as_text(token_id) if as_ids else tokenizer.token_text(token_id) for token_id in token_ids]
        detokenizer = IncrementalDetokenizer(tokenizer, skip_special_tokens=False)
        delta = detokenizer.add(token_ids)
        begin = max(0, (delta.text + detokenizer.finish().text).find(text))
        offsets = [min(max(0, offset - begin), len(text)) for offset in delta.text_offsets]
        return cls(names, offsets, logprobs)


def completion_logprobs(
    output: CompletionOutput,
    *,
    text_offset: int = 0,
    echoed: EchoedTokens | None = None,
    as_ids: bool = False,
    num_packed: int = 0,
) -> CompletionLogprobs | None:
    """For completions: parallel lists.

    Args:
        output: A delta or a whole completion.
        text_offset: Where the output begins in the returned text.
        echoed: The prompt's tokens, which come first when the prompt is echoed.
        as_ids: Name tokens by their ids, not by their texts.
        num_packed: Pack so many of the most likely tokens of each place, in place of their names; 0 for names.
    """
    if output.logprobs is None:
        return None
    result = CompletionLogprobs([], [], [], [])
    if num_packed:
        result.packed_top_logprobs = _packed(output.logprobs, num_packed)
    if echoed is not None:
        result.text_offset += echoed.offsets
        result.tokens += echoed.names
        for each in echoed.logprobs:
            result.token_logprobs.append(None if each is None else max(each[0].logprob, LOWEST))
            result.top_logprobs.append(None if each is None else _by_name(each, as_ids))
    for candidates, offset in zip(output.logprobs, output.text_offsets, strict=True):
        result.text_offset.append(text_offset + offset)
        result.tokens.append(_name(candidates[0], as_ids))
        result.token_logprobs.append(max(candidates[0].logprob, LOWEST))
        if not num_packed:
            result.top_logprobs.append(_by_name(candidates, as_ids))
    return result


def _packed(positions: Sequence[list[Logprob]], width: int) -> PackedLogprobs:
    """The `width` most likely tokens of each place, the likeliest first. The chosen one is among them by its rank
    alone."""
    rows = [
        sorted({each.token_id: each for each in candidates}.values(), key=lambda each: each.rank or 0)[:width]
        for candidates in positions
    ]
    token_ids = [each.token_id for row in rows for each in row]
    values = [each.logprob for row in rows for each in row]
    return PackedLogprobs(
        b64encode(struct.pack(f"<{len(token_ids)}i", *token_ids)).decode(),
        b64encode(struct.pack(f"<{len(values)}f", *values)).decode(),
        (len(rows), width),
    )


def _by_name(candidates: list[Logprob], as_ids: bool) -> dict[str, float]:
    # Several ids may have one text; the most likely of them counts, and the chosen token is always there.
    result: dict[str, float] = {}
    for each in (*candidates[1:], candidates[0]):
        result.setdefault(_name(each, as_ids), max(each.logprob, LOWEST))
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

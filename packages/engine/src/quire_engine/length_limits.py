"""How long a prompt and its output may be. Knows the engine's limits; knows no tokens."""

from __future__ import annotations

import functools

from quire_engine.messages import EngineInfo
from quire_interfaces import ContextLengthError, SamplingParams

__all__ = ["check_prompt_length", "check_whole_prompt", "resolve_max_tokens"]


def check_prompt_length(info: EngineInfo, num_prompt_tokens: int, params: SamplingParams) -> None:
    """Raises ContextLengthError when no request can have a prompt of so many tokens."""
    longest = info.max_encoder_len
    if longest and num_prompt_tokens > longest:
        raise ContextLengthError(
            f"the prompt has {num_prompt_tokens} tokens, and this model's encoder reads at most {longest}, all at "
            "once: shorten the prompt",
            num_prompt_tokens=num_prompt_tokens,
            max_model_len=longest,
        )
    if longest or num_prompt_tokens <= info.max_model_len:
        return
    if params.max_tokens != 0:
        resolve_max_tokens(info, num_prompt_tokens, params)
    check_whole_prompt(info, num_prompt_tokens)


def check_whole_prompt(info: EngineInfo, num_prompt_tokens: int, longest: int = 0) -> None:
    """Raises ContextLengthError when a prompt of so many tokens is longer than `longest`, or does not fit the context
    by itself where that is 0."""
    if num_prompt_tokens <= (limit := longest or info.max_model_len):
        return
    raise ContextLengthError(
        f"the prompt has {num_prompt_tokens} tokens, but this model's context is {limit} tokens: shorten the prompt",
        num_prompt_tokens=num_prompt_tokens,
        max_model_len=limit,
        max_tokens=0,
    )


def resolve_max_tokens(info: EngineInfo, num_prompt_tokens: int, params: SamplingParams) -> int:
    """Number of tokens that the output may have: `params.max_tokens`, or the rest of the context.

    Args:
        info: The engine's limits.
        num_prompt_tokens: Tokens that the output follows.
        params: Of the request.

    Raises:
        ContextLengthError: prompt and output do not fit the context.
    """
    room = info.max_model_len - num_prompt_tokens
    if room < max(1, params.max_tokens or 0, params.min_tokens):
        raise _too_long(info.max_model_len, num_prompt_tokens, params)
    return room if params.max_tokens is None else params.max_tokens


def _too_long(context: int, num_prompt_tokens: int, params: SamplingParams) -> ContextLengthError:
    """Why prompt and output do not fit a context of so many tokens."""
    error = functools.partial(
        ContextLengthError,
        num_prompt_tokens=num_prompt_tokens,
        max_model_len=context,
        max_tokens=params.max_tokens,
    )
    room = context - num_prompt_tokens
    if room < 1:
        return error(
            f"the prompt has {num_prompt_tokens} tokens, but this model's context is {context} tokens and at "
            "least one must be left for the output: shorten the prompt",
        )
    if params.max_tokens is not None and params.max_tokens > room:
        return error(
            f"the prompt has {num_prompt_tokens} tokens and max_tokens is {params.max_tokens}, together "
            f"{num_prompt_tokens + params.max_tokens}, but this model's context is {context} tokens: shorten the "
            f"prompt, or ask for at most {room} tokens",
            param="max_tokens",
        )
    return error(
        f"the prompt has {num_prompt_tokens} tokens and min_tokens is {params.min_tokens}, but this model's "
        f"context is {context} tokens: ask for at most {room} tokens",
        param="min_tokens",
    )

"""`truncate_prompt_tokens`: prompts that are cut instead of being refused. The names are vLLM's."""

from __future__ import annotations

import dataclasses
from typing import Literal

from quire_interfaces import RenderedPrompt, RequestError, SamplingParams
from quire_server.context import ServerContext

__all__ = ["truncated"]


def truncated(
    context: ServerContext,
    prompt: RenderedPrompt,
    keep: int | None,
    side: Literal["left", "right"] | None,
    params: SamplingParams,
) -> RenderedPrompt:
    """The prompt with at most `keep` tokens.

    Args:
        context: Knows how many tokens the model takes.
        prompt: As it was rendered.
        keep: How many tokens; -1 as many as leave room for `params.max_tokens`; None all of them.
        side: Where tokens are dropped: at the beginning ("left", also for None), or at the end.
        params: Of the request.

    Raises:
        RequestError: `keep` is no such number.
    """
    if keep is None:
        return prompt
    info = context.llm.engine.info
    if keep == -1:
        # What an encoder reads takes no room of the output.
        keep = info.max_encoder_len or max(1, info.max_model_len - (params.max_tokens or 1))
    if keep < 1:
        raise RequestError(
            f"truncate_prompt_tokens must be at least 1, or -1 for as many as the model takes, got {keep}",
            param="truncate_prompt_tokens",
        )
    if len(prompt.token_ids) <= keep:
        return prompt
    if prompt.media is not None:
        raise RequestError(
            f"the prompt has {len(prompt.token_ids)} tokens and holds media, which cannot be cut; leave "
            "truncate_prompt_tokens out, or send less",
            param="truncate_prompt_tokens",
            code="unsupported_combination",
        )
    kept_ids = prompt.token_ids[:keep] if side == "right" else prompt.token_ids[-keep:]
    return dataclasses.replace(prompt, token_ids=kept_ids, num_reused_tokens=0)

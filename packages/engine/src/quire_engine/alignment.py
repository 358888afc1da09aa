"""Requests that align a text with the sound that it was heard in: a decoder reads the text, and heads of its cross
attention say where in the sound each token is. The answer is a pooled output."""

from __future__ import annotations

import msgspec

from quire_engine.length_limits import check_whole_prompt
from quire_engine.messages import AddRequest, EngineInfo, pack_token_ids
from quire_engine.params_resolver import check_token_ids
from quire_interfaces import PoolingParams, RenderedPrompt, RequestError

__all__ = ["alignment_params", "check_alignment", "with_decoder_prompt"]


def alignment_params(num_before: int, num_places: int) -> PoolingParams:
    """What asks for an alignment.

    Args:
        num_before: Tokens of the decoder's prompt before the text; one token behind the text ends it.
        num_places: Places of the encoder's output that are sound, from the first.
    """
    asked = {"num_before": num_before, "num_places": num_places}
    return PoolingParams(task="plugin", extra_kwargs={"alignment": asked})


def check_alignment(info: EngineInfo, prompt: RenderedPrompt, params: PoolingParams) -> None:
    """Raises RequestError where an engine with an encoder cannot compute this."""
    if not info.aligns_words or params.task != "plugin" or not prompt.decoder_token_ids:
        raise RequestError(
            f"{info.model or 'this model'} generates text and pools nothing", param="task", code="unsupported"
        )
    check_token_ids("decoder_prompt", prompt.decoder_token_ids, info.vocab_size)
    check_whole_prompt(info, len(prompt.decoder_token_ids))


def with_decoder_prompt(message: AddRequest, prompt: RenderedPrompt) -> AddRequest:
    """The message of a request whose text the decoder reads, and whose other prompt the encoder does."""
    assert prompt.decoder_token_ids is not None
    return msgspec.structs.replace(
        message, prompt=pack_token_ids(prompt.decoder_token_ids), encoder_prompt=message.prompt
    )

"""How many log probabilities of a token requests may ask for. Knows settings and the vocabulary, no tensors."""

from __future__ import annotations

from quire_interfaces import ALL_LOGPROBS, RequestError, SamplingParams

__all__ = ["check_logprobs", "resolved_max_logprobs"]


def resolved_max_logprobs(setting: int, vocab_size: int) -> int:
    """The bound as a count: `ALL_LOGPROBS` is the whole vocabulary."""
    return vocab_size if setting == ALL_LOGPROBS else setting


def check_logprobs(params: SamplingParams, setting: int, vocab_size: int, *, remedy: str) -> None:
    """Whether a request gets what it asks for.

    Args:
        params: Of the request.
        setting: `max_logprobs` of the settings.
        vocab_size: Of the model.
        remedy: How to raise the bound, for the message.

    Raises:
        RequestError: it asks for more than the settings allow.
    """
    bound = resolved_max_logprobs(setting, vocab_size)
    for name in ("logprobs", "prompt_logprobs"):
        count = getattr(params, name)
        if name == "logprobs" and params.logprob_token_ids is not None:
            continue  # of which there are few, and none has to be found
        if count is None or (vocab_size if count == ALL_LOGPROBS else count) <= bound:
            continue
        count_text = f"{count} (the whole vocabulary, {vocab_size} tokens)" if count == ALL_LOGPROBS else count
        raise RequestError(f"{name} must be at most {bound} on this server, got {count_text}; {remedy}", param=name)

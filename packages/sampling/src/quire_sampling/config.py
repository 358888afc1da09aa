"""What an operator may set about sampling. Everything else belongs to the request (`SamplingParams`)."""

from __future__ import annotations

from dataclasses import dataclass

from quire_interfaces import MAX_LOGPROBS, Settings, between, setting

__all__ = ["SamplingConfig"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingConfig(Settings):
    """Limits of the sampler."""

    max_logprobs: int = setting(
        20,
        help="Most log probabilities per token (logprobs, prompt_logprobs) that a request may ask for.",
        unit="tokens",
        check=between(0, MAX_LOGPROBS),
    )

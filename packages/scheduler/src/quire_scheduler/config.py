"""The scheduler's settings. Field names and flags are vLLM's where the meaning is the same."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from quire_interfaces import ConfigError, Settings, one_of, setting

__all__ = ["MAX_SLOWDOWN", "SchedulerConfig"]

MAX_SLOWDOWN = 1000
"""A larger `max_tenant_slowdown` bounds nothing that anybody would wait for."""


def _whole(minimum: int) -> Callable[[Any], str | None]:
    def check(value: Any) -> str | None:
        fine = isinstance(value, int) and not isinstance(value, bool) and value >= minimum
        return None if fine else f"be a whole number of at least {minimum}"

    return check


def _boolean(value: Any) -> str | None:
    return None if isinstance(value, bool) else "be true or false"


def _slowdown(value: Any) -> str | None:
    fine = isinstance(value, int | float) and not isinstance(value, bool) and (value == 0 or 1 < value <= MAX_SLOWDOWN)
    return None if fine else f"be 0 (no bound), or a number above 1 and at most {MAX_SLOWDOWN}"


def _latency(value: Any) -> str | None:
    fine = isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value <= 3600
    return None if fine else "be 0 (no bound), or seconds of at most 3600"


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig(Settings):
    """How much a step may compute, how many requests run and wait, and in which order.

    Raises:
        ConfigError: A value is out of range, or two values contradict each other.
    """

    max_num_batched_tokens: int = setting(
        2048, help="Most tokens computed in one step, prompts and outputs together.", unit="tokens", check=_whole(1)
    )
    max_num_seqs: int = setting(
        256, help="Most requests that run at the same time (rows of the runner).", unit="requests", check=_whole(1)
    )
    max_model_len: int | None = setting(
        None, help="Context length: prompt and output together; None sets no bound.", unit="tokens", check=_whole(2)
    )
    policy: str = setting(
        "fcfs",
        help="Order of requests: by arrival, or by priority (lower first) and then arrival.",
        check=one_of("fcfs", "priority"),
        flag="--scheduling-policy",
    )
    enable_chunked_prefill: bool = setting(
        True, help="Whether a prompt may be computed in parts over several steps.", check=_boolean
    )
    long_prefill_token_threshold: int = setting(
        0, help="Most prompt tokens of one request in one step; 0 sets no bound.", unit="tokens", check=_whole(0)
    )
    max_queued_requests: int = setting(
        1024,
        help="Most requests that wait; a further one is answered with an overload error. Of one API key's at most as "
        "many wait as there are places left, so that a flood leaves room for the others.",
        unit="requests",
        check=_whole(1),
    )
    max_running_per_tenant: int = setting(
        0,
        help="Most requests of one tenant (the callers of one API key) that run at the same time; 0 sets no bound.",
        unit="requests",
        check=_whole(0),
    )
    max_tenant_slowdown: float | None = setting(
        None,
        help="How many times as long as alone the steps of one tenant may take because of another one's requests, by "
        "the time that steps were measured to take; the other one may always run as many requests. Above 1, at most "
        "1000; 0 sets no bound. Empty: 1.7 on a server with the keys of several callers, else no bound.",
        check=_slowdown,
    )
    max_inter_token_latency: float | None = setting(
        None,
        help="How long a step may take while requests decode: prompts of others are computed in chunks as large as "
        "that allows, by the time that steps were measured to take, or as take as long as the decodes alone. Above 0, "
        "at most 3600; 0 sets no bound. Empty: 0.15 on a server, else no bound.",
        unit="s",
        check=_latency,
    )
    encoder_cache_size: int | None = setting(
        None,
        help="Most embeddings of images, videos and sounds that are kept for use again; also the largest item, and "
        "what one step encodes. Empty: as many as the context has tokens, at most 16,384, but at least "
        "max_num_batched_tokens.",
        unit="embeddings",
        check=_whole(1),
    )
    num_speculative_tokens: int = setting(
        0, help="Most draft tokens verified per request and step; 0 ignores drafts.", unit="tokens", check=_whole(0)
    )
    num_lookahead_tokens: int = setting(
        0,
        help="Slots behind the next token that a drafting network writes to; it drafts less where they are not free.",
        unit="tokens",
        check=_whole(0),
    )

    def __post_init__(self) -> None:
        # dataclass(slots=True) makes a second class, which the zero-argument super() would not know.
        Settings.__post_init__(self)
        if self.enable_chunked_prefill:
            return
        if self.max_model_len is None or self.max_num_batched_tokens < self.max_model_len:
            raise ConfigError(
                f"enable_chunked_prefill=False computes each prompt in one step, so max_num_batched_tokens "
                f"({self.max_num_batched_tokens}) must be at least max_model_len ({self.max_model_len}); "
                f"raise the first, lower the second, or switch chunked prefill on",
                field="max_num_batched_tokens",
            )
        if self.long_prefill_token_threshold:
            raise ConfigError(
                f"long_prefill_token_threshold ({self.long_prefill_token_threshold}) needs chunked prefill; "
                f"set it to 0 or switch enable_chunked_prefill on",
                field="long_prefill_token_threshold",
            )

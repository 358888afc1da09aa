"""What an engine tells those who watch it: its steps, its requests, and who holds which block. Pure data.

Times are `time.monotonic()` seconds of the engine's process; `WatchReport.now_s` says what time it is there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from quire_interfaces.kv_cache import KVCacheUsage, PrefixCacheMiss
from quire_interfaces.request import Request

__all__ = [
    "BLOCK_CACHED",
    "BLOCK_FREE",
    "BLOCK_SHARED",
    "FIRST_NUMBER",
    "PromptChunk",
    "RequestRecord",
    "RowRecord",
    "StepRecord",
    "WatchCursor",
    "WatchReport",
    "WatchedKVCache",
]

BLOCK_FREE = 0
"""Holder of a block that holds nothing that anybody could find."""
BLOCK_CACHED = -1
"""Holder of a block that no request uses and whose content is in the prefix cache."""
BLOCK_SHARED = 1
"""Holder of a block of a cached prefix that several requests use."""
FIRST_NUMBER = 2
"""Smallest number of a request. A block that request n has computed has the holder n, one of a cached prefix that it
alone uses -n."""


class WatchedKVCache(Protocol):
    """What whoever watches an engine may ask of its KV cache. Changes nothing."""

    def usage(self) -> KVCacheUsage:
        """Free and total blocks."""

    def block_ids(self, request_id: str) -> tuple[list[int], ...]:
        """The request's block table per group. KeyError when it holds nothing."""

    def block_states(self, block_ids: Sequence[int]) -> bytes:
        """Per block: 0 free, 1 free with a content that is in the prefix cache, 2 in use."""

    def explain_miss(self, request: Request) -> PrefixCacheMiss:
        """Why the request's cached prefix ends where it does; may be slow."""


class StepRecord(NamedTuple):
    """One step, from its planning to its results."""

    number: int
    """Counts the steps that were watched, without gaps."""
    planned_s: float
    done_s: float
    num_prefill_tokens: int
    """Tokens of prompts, and of what preempted requests compute anew."""
    num_decode_tokens: int
    num_draft_tokens: int
    """Tokens that drafters or grammars proposed."""
    num_accepted_tokens: int
    """Number of these that were right."""
    num_prefill_rows: int
    num_decode_rows: int
    num_running: int
    num_waiting: int
    num_used_blocks: int


class PromptChunk(NamedTuple):
    """Known tokens of a request that one step computed: of its prompt, or anew after a preemption."""

    planned_s: float
    start: int
    """Position of the first of them."""
    num_tokens: int


# Many attributes: all that is known of one request, which is read as a whole.
@dataclass(slots=True, kw_only=True)
class RequestRecord:
    """What became of one request of the engine. Times that have not come are 0.0."""

    number: int
    """Of the engine; what blocks and rows refer to."""
    request_id: str
    client_request_id: str | None
    """Name of the HTTP request that it belongs to."""
    tenant: str | None
    num_prompt_tokens: int
    max_tokens: int
    queued_s: float
    is_complete: bool
    """Whether it was watched from its arrival on; if not, what came before is missing."""
    scheduled_s: float = 0.0
    """First entered a row."""
    first_token_s: float = 0.0
    finished_s: float = 0.0
    finish_reason: str | None = None
    num_cached_tokens: int = 0
    num_external_tokens: int = 0
    """Number of these that a KV tier brought."""
    num_output_tokens: int = 0
    miss_reason: str | None = None
    """Why the cached prefix ended where it did (`PrefixCacheMiss.reason`); None where nobody has looked."""
    miss_detail: str = ""
    wait_reason: str | None = None
    """Why it waits now; None while it does not."""
    waits_s: dict[str, float] = field(default_factory=dict)
    """Reason -> time that it has waited for it, measured when somebody looked."""
    grammar_s: float = 0.0
    """Time until its grammar was compiled."""
    chunks: list[PromptChunk] = field(default_factory=list)
    """The first ones, up to a bound; `num_chunks` counts them all."""
    num_chunks: int = 0
    preempted_s: list[float] = field(default_factory=list)
    """When it lost its row."""
    resumed_s: list[float] = field(default_factory=list)
    """When it entered a row again."""
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_forced_tokens: int = 0
    """Tokens that its grammar left no choice about."""


class RowRecord(NamedTuple):
    """Where a request that is not finished stands."""

    number: int
    phase: str
    """"waiting", "preempted", "prefill", "decode" or "draft": a decode with draft tokens."""
    num_computed_tokens: int
    """Number of prompt tokens that are computed or under way, cached ones included; behind the prompt, those that are
    known."""
    num_output_tokens: int
    num_blocks: int


class WatchCursor(NamedTuple):
    """How far somebody has read; the default has read nothing."""

    watch_id: int = 0
    """Of the watch: another one begins anew."""
    steps: int = 0
    blocks: int = 0
    requests: int = 0


@dataclass(slots=True, kw_only=True)
class WatchReport:
    """What an engine tells since a cursor."""

    cursor: WatchCursor
    """For the next report."""
    is_anew: bool
    """What was told before does not count any more: `holders` has all blocks, and `requests` all that are not
    finished."""
    now_s: float
    num_blocks: int
    block_size: int
    steps: list[StepRecord] = field(default_factory=list)
    holders: list[int] = field(default_factory=list)
    """Of each block, the null block left out, where it `is_anew`."""
    changes: list[tuple[int, int]] = field(default_factory=list)
    """(block, its holder from now on), in order."""
    requests: list[RequestRecord] = field(default_factory=list)
    """Those about which something has changed but the number of tokens."""
    rows: list[RowRecord] = field(default_factory=list)
    """Of all requests that are not finished, the running ones first."""
    waiting_reasons: dict[str, int] = field(default_factory=dict)
    """Why requests wait -> how many of those that were asked."""
    totals: dict[str, float] = field(default_factory=dict)
    """Counters of `SchedulerStats` since the engine's start, of what the view shows."""
    watch_share: float = 0.0
    """Share of the time since the last report that watching took."""
    num_restarts: int = 0
    """Engine processes before this one; filled in by the client."""

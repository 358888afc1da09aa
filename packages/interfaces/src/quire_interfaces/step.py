"""What crosses between scheduler and runner in one step, and what comes out of it. Pure data, no behaviour.

A *row* is the permanent place of a running request in the runner, `0 <= row < max_num_seqs`, given out by the
scheduler. Lists in `SchedulerOutput` that say "per entry" run in parallel: entry i speaks of the request in `rows[i]`.
Steps are executed in the order of `step_id`; a runner may assume that.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any, NamedTuple, Self

from quire_interfaces.errors import RequestError
from quire_interfaces.kv_transfer import KVTransferOutput, KVTransferPlan
from quire_interfaces.media import MediaItem, PromptMedia
from quire_interfaces.pooling import PooledOutput, PoolingParams
from quire_interfaces.request import FinishReason
from quire_interfaces.sampling_params import SamplingParams

__all__ = [
    "GRAMMAR_COMPILE_BOUNDS_S",
    "EngineCoreOutput",
    "ModelRunnerOutput",
    "NewRow",
    "RequestFailure",
    "SchedulerOutput",
    "SchedulerStats",
    "TokenExperts",
    "TokenLogprobs",
    "sum_stats",
]


class RequestFailure(NamedTuple):
    """Why one request cannot go on."""

    message: str
    code: str | None = None
    """Machine-readable reason, where the request asked for what it cannot have (`RequestError.code`); None where
    computing it failed."""
    param: str | None = None
    """Its field at fault (`RequestError.param`)."""
    signal: str | None = None
    """Name of the signal that ended the process that computed it, e.g. "SIGKILL"; None where none did."""

    @classmethod
    def of(cls, error: Exception) -> Self:
        """What an error says; of an unexpected one, its type as well."""
        if isinstance(error, RequestError):
            return cls(str(error), error.code, error.param)
        return cls(f"{type(error).__name__}: {error}")


@dataclass(slots=True, kw_only=True)
class NewRow:
    """Everything the runner needs to know about a request that enters (or, after preemption, re-enters) a row."""

    row: int
    request_id: str
    token_ids: list[int]
    """Prompt, followed by tokens already generated if the request was preempted."""
    num_prompt_tokens: int
    num_computed_tokens: int
    """Tokens whose KV is already in the blocks (prefix cache)."""
    block_ids: tuple[list[int], ...]
    """All blocks it holds, per KV cache group, in token order."""
    sampling_params: SamplingParams
    seed: int
    num_encoder_tokens: int = 0
    """Tokens that its encoder reads, or has read."""
    encoder_token_ids: list[int] = field(default_factory=list)
    """These tokens, if the encoder has to read them in this step; empty when what it made of them is in the blocks."""
    media: PromptMedia | None = None
    """What stands among the tokens of its prompt; None for text alone."""
    pooling_params: PoolingParams | None = None
    """How its hidden states are pooled; None for a request that generates."""
    second_segment_start: int = 0
    """Position of the first token of the second text, where the prompt is a pair with token types; 0 elsewhere."""
    stop_token_ids: frozenset[int] = frozenset()
    cache_salt: str | None = None
    """What the runner keeps beyond the request may serve requests with the same salt only."""
    adapter_slot: int = -1
    """Where its adapter has to be from this step on, -1 for none; the slot holds nothing that other rows need."""
    adapter_version: str = ""
    """Which adapter."""


@dataclass(slots=True, kw_only=True)
class SchedulerOutput:
    """The plan of one step. May be empty (no entries) when only rows are freed."""

    step_id: int
    rows: list[int]
    """Per entry: the row."""
    request_ids: list[str]
    """Per entry: the request's id (for errors and logs; rows are what the runner indexes with)."""
    num_computed_tokens: list[int]
    """Per entry: position of the first token computed in this step."""
    num_scheduled_tokens: list[int]
    """Per entry: tokens computed in this step, draft tokens included; at least 1."""
    samples: list[bool]
    """Per entry: whether the step reaches the end of the known tokens, so that a token is sampled."""
    total_num_scheduled_tokens: int = 0
    new_rows: list[NewRow] = field(default_factory=list)
    """Rows to fill before the step; each is also an entry. A row may be listed here and in `freed_rows`."""
    new_block_ids: dict[int, tuple[list[int], ...]] = field(default_factory=dict)
    """Row -> blocks to append to its block table, per group; rows of `new_rows` are not listed."""
    draft_token_ids: dict[int, list[int]] = field(default_factory=dict)
    """Row -> draft tokens, which follow the last known token; counted in `num_scheduled_tokens`."""
    draft_parents: dict[int, list[int]] = field(default_factory=dict)
    """Row -> where its draft tokens are a tree, the place of the one that each follows, -1 for the last known token;
    parents come first. Other rows have chains."""
    forced_rows: set[int] = field(default_factory=set)
    """Rows of `draft_token_ids` whose drafts are certain (see `ModelRunnerOutput.forced_token_ids`): they are taken as
    they are, not verified."""
    freed_rows: list[int] = field(default_factory=list)
    """Rows whose request finished or was preempted since the last step; freed before `new_rows` are filled."""
    freed_media: list[str] = field(default_factory=list)
    """Keys of items whose embeddings the runner has to forget, before it encodes others."""
    encode: list[MediaItem] = field(default_factory=list)
    """Items that towers have to read before the step's tokens are computed; the runner keeps the embeddings until they
    are in `freed_media` of a later step."""
    kv_transfer: KVTransferPlan | None = None
    """Blocks to move between memory and a tier; begun before everything else of the step."""


@dataclass(slots=True)
class TokenLogprobs:
    """Log probabilities at one position: the sampled (or given) token first, then the most likely ones, best first."""

    token_ids: list[int]
    logprobs: list[float]
    rank: int
    """Rank of the first entry's token in the whole vocabulary, 1 is the most likely."""


class TokenExperts(NamedTuple):
    """The experts that routers chose for consecutive tokens of one request."""

    start: int
    """Position of the first of these tokens."""
    num_layers: int
    """Layers with routed experts, in the order of the network."""
    top_k: int
    """Experts of a token in a layer."""
    dtype: str
    """Of an expert's number: "uint8" or "uint16"."""
    data: bytes
    """[tokens, num_layers, top_k]."""

    @property
    def token_bytes(self) -> int:
        """Bytes of one token."""
        return self.num_layers * self.top_k * (1 if self.dtype == "uint8" else 2)

    @property
    def stop(self) -> int:
        """Position behind the last of these tokens."""
        return self.start + len(self.data) // self.token_bytes


@dataclass(slots=True, kw_only=True)
class ModelRunnerOutput:
    """What one step produced. Dictionaries are keyed by row and hold only rows that asked."""

    step_id: int
    sampled_token_ids: list[list[int]]
    """Per entry: accepted draft tokens followed by the bonus token; empty where `samples` was False. Of a row that is
    pooled, its one stop token, once `pooled` has its output."""
    pooled: dict[int, PooledOutput] = field(default_factory=dict)
    """Row -> the pooled output of its prompt, which is read to its end."""
    logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)
    """Row -> one per sampled token."""
    prompt_logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)
    """Row -> prompt positions finished in this step, in order (position 0 has none)."""
    draft_token_ids: dict[int, list[int]] = field(default_factory=dict)
    """Row -> proposal for the next step."""
    draft_parents: dict[int, list[int]] = field(default_factory=dict)
    """Row -> what its proposal's tokens follow, if it is a tree (see `SchedulerOutput`)."""
    drafts_follow: bool = True
    """Whether the next steps may bring proposals. If not, nobody needs to wait for this step's result to plan the next
    one; a proposal that comes behind a step that was planned before is dropped."""
    draft_seconds: float = 0.0
    """Time that finding the proposals took."""
    draft_saved_seconds: float = 0.0
    """Time that drafting saved in this step against plain steps, as far as it is known; less than 0 where it lost."""
    forced_token_ids: dict[int, list[int]] = field(default_factory=dict)
    """Row -> tokens that certainly follow the last one in `sampled_token_ids`, because the request's grammar leaves no
    choice. Steps in flight produce the first of them; the scheduler may put the others into the next step as drafts."""
    failed_rows: dict[int, RequestFailure] = field(default_factory=dict)
    """Row -> why this request cannot go on (its own fault, e.g. a logits processor that raised)."""
    failed_media: dict[str, str] = field(default_factory=dict)
    """Key -> why an item of `SchedulerOutput.encode` could not be encoded; its requests are in `failed_rows`."""
    encode_seconds: dict[str, float] = field(default_factory=dict)
    """Modality -> time that towers took for the items of `SchedulerOutput.encode`."""
    encoded_media: list[MediaItem] = field(default_factory=list)
    """Items of `SchedulerOutput.encode` that towers have read; the others were embeddings already, or in a tier."""
    kv_transfer: KVTransferOutput | None = None
    """What became of blocks on their way from or to a tier."""
    routed_experts: dict[int, bytes] = field(default_factory=dict)
    """Row -> the experts of its tokens in the step, as `TokenExperts.data`; empty where nobody is to know them."""


class EngineCoreOutput(NamedTuple):
    """What one step produced for one request, on its way to the client."""

    request_id: str
    new_token_ids: list[int]
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None
    """The token that ended the output, when finish_reason is STOP."""
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs] | None = None
    num_cached_tokens: int = 0
    """Prompt tokens that were not computed because the prefix cache had them."""
    failure: RequestFailure | None = None
    """With FinishReason.ERROR: why."""
    pooled: PooledOutput | None = None
    """Of a request that is pooled: its output, which is all that comes of it."""
    kv_transfer_params: dict[str, Any] | None = None
    """With the end of a request whose keys and values somebody else is to have: where they are."""
    routed_experts: TokenExperts | None = None
    """The experts of the tokens that were not told of yet, the last sampled one aside; None where nobody is to know
    them. After a preemption they begin anew."""


GRAMMAR_COMPILE_BOUNDS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
"""Upper bounds of the buckets in which compile times of grammars are counted, in seconds."""


@dataclass(slots=True, kw_only=True)
class SchedulerStats:
    """Counters and gauges at the end of a step. Counters (`num_..._total`) only grow."""

    num_running: int = 0
    num_waiting: int = 0
    num_waiting_deferred: int = 0
    """Number of waiting requests that wait for something of their own (a grammar, a tenant's share, a pause), not for
    room."""
    num_preempted: int = 0
    """Number of waiting requests that have run before."""
    kv_cache_usage: float = 0.0
    """Used share of the KV cache blocks, 0 to 1."""
    num_prompt_tokens_total: int = 0
    """Prompt tokens of requests that reached their first output token."""
    num_cached_prompt_tokens_total: int = 0
    """Number of those prompt tokens that were not computed: the prefix cache had them, in memory or in a tier."""
    num_external_prompt_tokens_total: int = 0
    """Number of those cached prompt tokens that a tier brought."""
    num_generation_tokens_total: int = 0
    num_preemptions_total: int = 0
    prefix_cache_query_tokens_total: int = 0
    prefix_cache_hit_tokens_total: int = 0
    external_prefix_cache_query_tokens_total: int = 0
    """Tokens that were not in memory and looked up in a tier outside of it."""
    external_prefix_cache_hit_tokens_total: int = 0
    """Number of tokens that the tier brought; `prefix_cache_hit_tokens_total` does not count them."""
    num_draft_tokens_total: int = 0
    num_accepted_tokens_total: int = 0
    num_drafts_total: int = 0
    num_accepted_tokens_per_pos_total: list[int] = field(default_factory=list)
    """Entry i counts the drafts whose token i (from 0) was accepted; as long as the longest draft allowed."""
    draft_seconds_total: float = 0.0
    """Time that finding drafts took."""
    draft_saved_seconds: float = 0.0
    """Time that drafting has saved against plain steps, as the controller of draft lengths measures it; trials that
    lose are in it, so that it may shrink."""
    num_grammar_queries_total: int = 0
    """Constraints on outputs that requests asked for."""
    num_grammar_hits_total: int = 0
    """Number of constraints that were compiled, or being compiled, already."""
    num_grammar_failures_total: int = 0
    """Compiles of constraints that ended in a refusal."""
    grammar_compile_counts_total: list[int] = field(default_factory=list)
    """Compiles per bucket of `GRAMMAR_COMPILE_BOUNDS_S`; the last one has no bound. Empty without structured output."""
    grammar_compile_seconds_total: float = 0.0
    encoder_cache_usage: float = 0.0
    """Used share of the cache of encoded media, 0 to 1."""
    encoder_cache_queries_total: int = 0
    """Number of media items that requests needed the embeddings of."""
    encoder_cache_hits_total: int = 0
    """Number of those items whose embeddings were there already."""
    num_encoded_items_total: dict[str, int] = field(default_factory=dict)
    """Modality -> items that towers have read."""
    num_encoded_embeds_total: dict[str, int] = field(default_factory=dict)
    """Modality -> embeddings that towers have made."""
    encode_seconds_total: dict[str, float] = field(default_factory=dict)
    """Modality -> time that towers took."""
    jit_compilations_total: dict[str, int] = field(default_factory=dict)
    """Name of a kernel -> how often it was compiled after the start, while requests waited."""
    expert_balancedness: float = 0.0
    """Where experts are balanced over ranks: mean tokens of a rank over those of the fullest one in the last steps, on
    average over the layers; 0 elsewhere."""
    num_expert_rebalances_total: int = 0
    """Times that experts were moved."""
    num_moved_experts_total: int = 0
    """Experts that came to another rank."""
    expert_rank_tokens_total: dict[str, int] = field(default_factory=dict)
    """Rank -> pairs of token and expert that it computed; empty where experts are not balanced."""
    num_adapters_running: int = 0
    """Adapters that running requests use."""
    num_adapter_slots: int = 0
    """Adapters that can be in use at once; 0 where none are served."""
    num_adapter_placements_total: int = 0
    """Adapters that were put into a slot."""
    num_adapter_merges_total: int = 0
    """Adapters that were put into the network's own weights."""
    adapter_requests_running: dict[str, int] = field(default_factory=dict)
    """Name of an adapter -> requests that run with it."""
    adapter_requests_waiting: dict[str, int] = field(default_factory=dict)
    """Name of an adapter -> requests that wait for it."""


def sum_stats(each_stats: Sequence[SchedulerStats]) -> SchedulerStats:
    """Statistics of several engines, of at least one, as one: counts and times added, used shares averaged."""
    names = [spec.name for spec in dataclasses.fields(SchedulerStats)]
    together: dict[str, Any] = {name: getattr(each_stats[0], name) for name in names}
    for stats in each_stats[1:]:
        together = {name: _added(together[name], getattr(stats, name)) for name in names}
    for name in names:
        if name.endswith("_usage"):
            together[name] /= len(each_stats)
    return SchedulerStats(**together)


def _added(mine: Any, other: Any) -> Any:
    if isinstance(mine, list):
        return [sum(pair) for pair in zip_longest(mine, other, fillvalue=0)]
    if isinstance(mine, dict):
        return {key: mine.get(key, 0) + other.get(key, 0) for key in {**other, **mine}}
    return mine + other

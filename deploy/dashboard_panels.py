"""What the dashboards show: rows of panels with their PromQL, described once for Grafana and for Perses.

In an expression `@name` stands for a metric of the engine: `write_dashboards.py` puts the prefix before it and the
dashboard's variables behind it, so that `rate(@generation_tokens_total[R])` becomes
`rate(quire:generation_tokens_total{model_name=~"$model",engine=~"$engine",instance=~"$instance"}[$__rate_interval])`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["ROWS", "VARIABLES", "Panel", "Query", "Row", "Unit", "Variable"]

Unit = Literal["count", "tokens", "per second", "tokens per second", "seconds", "share"]
"""What a panel's numbers are; a share is between 0 and 1, and shown in percent."""


@dataclass(frozen=True, slots=True)
class Query:
    """One expression of a panel."""

    expression: str
    legend: str = ""
    """Name of its series, with labels as {{label}}."""


@dataclass(frozen=True, slots=True)
class Panel:
    """A graph over time, or the last value of one."""

    title: str
    unit: Unit
    queries: tuple[Query, ...]
    description: str = ""
    is_stat: bool = False
    """Whether it shows the last value as a number."""
    is_stacked: bool = False


@dataclass(frozen=True, slots=True)
class Row:
    """Panels below one heading."""

    title: str
    panels: tuple[Panel, ...]
    is_collapsed: bool = False
    """For what not every server has."""


@dataclass(frozen=True, slots=True)
class Variable:
    """A choice above the dashboard: the values that a label has."""

    name: str
    label: str
    title: str


VARIABLES = (
    Variable("model", "model_name", "Model"),
    Variable("engine", "engine", "Engine"),
    Variable("instance", "instance", "Server"),
)


def _rate(metric: str, by: str = "") -> str:
    return f"sum{f' by ({by})' if by else ''} (rate(@{metric}[R]))"


def _increase(metric: str, by: str = "") -> str:
    return f"sum{f' by ({by})' if by else ''} (increase(@{metric}[R]))"


def _ratio(part: str, whole: str, by: str = "") -> str:
    return f"{_rate(part, by)} / {_rate(whole, by)}"


def _quantile(quantile: float, histogram: str, by: str = "le") -> str:
    return f"histogram_quantile({quantile}, {_rate(f'{histogram}_bucket', by)})"


def _percentiles(histogram: str) -> tuple[Query, ...]:
    return tuple(Query(_quantile(each, histogram), f"p{each * 100:.0f}") for each in (0.5, 0.95, 0.99))


def _mean(histogram: str, by: str = "") -> str:
    return _ratio(f"{histogram}_sum", f"{histogram}_count", by)


def _stat(title: str, unit: Unit, expression: str) -> Panel:
    return Panel(title, unit, (Query(expression),), is_stat=True)


ROWS = (
    Row(
        "Now",
        (
            _stat("Running requests", "count", "sum(@num_requests_running)"),
            _stat("Waiting requests", "count", "sum(@num_requests_waiting)"),
            _stat("Generation", "tokens per second", _rate("generation_tokens_total")),
            _stat("First token, p95", "seconds", _quantile(0.95, "time_to_first_token_seconds")),
            _stat("KV cache in use", "share", "max(@kv_cache_usage_perc)"),
            _stat("Prefix cache hits", "share", _ratio("prefix_cache_hits_total", "prefix_cache_queries_total")),
        ),
    ),
    Row(
        "Traffic",
        (
            Panel(
                "Requests in the engine",
                "count",
                (
                    Query("sum(@num_requests_running)", "running"),
                    Query("sum by (reason) (@num_requests_waiting_by_reason)", "waiting: {{reason}}"),
                ),
                "Requests wait for want of room (capacity), or for something of their own (deferred): a grammar, a "
                "tenant's share, a pause.",
                is_stacked=True,
            ),
            Panel(
                "Tokens",
                "tokens per second",
                (
                    Query(_rate("prompt_tokens_total"), "prompt"),
                    Query(_rate("generation_tokens_total"), "generation"),
                ),
            ),
            Panel(
                "Prompt tokens by source",
                "tokens per second",
                (Query(_rate("prompt_tokens_by_source_total", "source"), "{{source}}"),),
                "Computed, found in the prefix cache, or brought by a tier or another engine.",
                is_stacked=True,
            ),
            Panel(
                "Requests that ended",
                "per second",
                (Query(_rate("request_success_total", "finished_reason"), "{{finished_reason}}"),),
                is_stacked=True,
            ),
            Panel(
                "Refused requests",
                "per second",
                (Query(_rate("admission_rejections_total"), "refused"),),
                "What the engine did not take, such as prompts that are too long.",
            ),
            Panel(
                "Preemptions",
                "per second",
                (Query(_rate("num_preemptions_total"), "preemptions"),),
                "Requests that lost their blocks to others and are computed again: the KV cache is too small for them.",
            ),
            Panel("Prompt length", "tokens", _percentiles("request_prompt_tokens")),
            Panel("Output length", "tokens", _percentiles("request_generation_tokens")),
            Panel("Tokens per step", "tokens", _percentiles("iteration_tokens_total")),
        ),
    ),
    Row(
        "Latency",
        (
            Panel("Time to first token", "seconds", _percentiles("time_to_first_token_seconds")),
            Panel("Between tokens", "seconds", _percentiles("inter_token_latency_seconds")),
            Panel("End to end", "seconds", _percentiles("e2e_request_latency_seconds")),
            Panel("Queue", "seconds", _percentiles("request_queue_time_seconds")),
            Panel("Prefill", "seconds", _percentiles("request_prefill_time_seconds")),
            Panel("Decode", "seconds", _percentiles("request_decode_time_seconds")),
            Panel(
                "Mean time of a request by phase",
                "seconds",
                (
                    Query(_mean("request_queue_time_seconds"), "queue"),
                    Query(_mean("request_prefill_time_seconds"), "prefill"),
                    Query(_mean("request_decode_time_seconds"), "decode"),
                ),
                is_stacked=True,
            ),
        ),
    ),
    Row(
        "KV cache",
        (
            Panel("Blocks in use", "share", (Query("max by (engine) (@kv_cache_usage_perc)", "engine {{engine}}"),)),
            Panel(
                "Hits",
                "share",
                (
                    Query(_ratio("prefix_cache_hits_total", "prefix_cache_queries_total"), "in memory"),
                    Query(
                        _ratio("external_prefix_cache_hits_total", "external_prefix_cache_queries_total"),
                        "tiers, of what was not in memory",
                    ),
                ),
            ),
            Panel(
                "Prompt tokens that were not computed",
                "share",
                (Query(_ratio("prompt_tokens_cached_total", "prompt_tokens_total"), "cached"),),
            ),
        ),
    ),
    Row(
        "Reliability",
        (
            Panel("Engine restarts", "count", (Query(_increase("engine_restarts_total", "reason"), "{{reason}}"),)),
            Panel(
                "Stalls",
                "count",
                (Query(_increase("engine_stalls_total"), "stalls"),),
                "Times that an engine took no step though it had requests.",
            ),
            Panel(
                "Kernels compiled while serving",
                "count",
                (Query(_increase("jit_compilations_total", "kernel"), "{{kernel}}"),),
                "Should be none once the server is ready.",
            ),
        ),
    ),
    Row(
        "Engines of a server (data parallel)",
        (
            Panel("Running", "count", (Query("sum by (engine) (@num_requests_running)", "engine {{engine}}"),)),
            Panel("Waiting", "count", (Query("sum by (engine) (@num_requests_waiting)", "engine {{engine}}"),)),
            Panel(
                "Generation",
                "tokens per second",
                (Query(_rate("generation_tokens_total", "engine"), "engine {{engine}}"),),
            ),
            Panel(
                "Prefix cache hits",
                "share",
                (
                    Query(
                        _ratio("prefix_cache_hits_total", "prefix_cache_queries_total", "engine"), "engine {{engine}}"
                    ),
                ),
            ),
        ),
        is_collapsed=True,
    ),
    Row(
        "Tenants",
        (
            Panel(
                "Requests that ended", "per second", (Query(_rate("tenant_requests_total", "tenant"), "{{tenant}}"),)
            ),
            Panel(
                "Prompt tokens",
                "tokens per second",
                (Query(_rate("tenant_prompt_tokens_total", "tenant"), "{{tenant}}"),),
            ),
            Panel(
                "Generated tokens",
                "tokens per second",
                (Query(_rate("tenant_generation_tokens_total", "tenant"), "{{tenant}}"),),
            ),
            Panel(
                "Cached prompt tokens",
                "share",
                (Query(_ratio("tenant_cached_tokens_total", "tenant_prompt_tokens_total", "tenant"), "{{tenant}}"),),
            ),
        ),
        is_collapsed=True,
    ),
    Row(
        "Speculative decoding",
        (
            Panel(
                "Accepted draft tokens",
                "share",
                (
                    Query(
                        _ratio("spec_decode_num_accepted_tokens_total", "spec_decode_num_draft_tokens_total"),
                        "accepted",
                    ),
                ),
            ),
            Panel(
                "Accepted by position",
                "share",
                (
                    Query(
                        f"{_rate('spec_decode_num_accepted_tokens_per_pos_total', 'position')} / on() group_left() "
                        f"{_rate('spec_decode_num_drafts_total')}",
                        "position {{position}}",
                    ),
                ),
            ),
            Panel(
                "Tokens of a step with a draft",
                "tokens",
                (
                    Query(
                        f"1 + {_ratio('spec_decode_num_accepted_tokens_total', 'spec_decode_num_drafts_total')}", "mean"
                    ),
                ),
            ),
            Panel(
                "Time of finding drafts",
                "share",
                (Query(_rate("spec_decode_draft_seconds_total"), "drafting"),),
                "Of the engine's time.",
            ),
            Panel("Time saved", "seconds", (Query("sum(@spec_decode_saved_seconds)", "saved since the start"),)),
        ),
        is_collapsed=True,
    ),
    Row(
        "Structured output",
        (
            Panel(
                "Grammar cache hits",
                "share",
                (Query(_ratio("grammar_cache_hits_total", "grammar_cache_queries_total")),),
            ),
            Panel("Compiling a grammar", "seconds", _percentiles("grammar_compile_seconds")),
            Panel(
                "Refused schemas and grammars",
                "per second",
                (Query(_rate("grammar_compile_failures_total"), "refused"),),
            ),
        ),
        is_collapsed=True,
    ),
    Row(
        "Adapters (LoRA)",
        (
            Panel(
                "Slots",
                "count",
                (
                    Query("sum(@lora_adapters_running)", "adapters in use"),
                    Query("sum(@lora_adapter_slots)", "slots"),
                ),
            ),
            Panel("Running requests", "count", (Query("sum by (adapter) (@lora_requests_running)", "{{adapter}}"),)),
            Panel("Waiting requests", "count", (Query("sum by (adapter) (@lora_requests_waiting)", "{{adapter}}"),)),
            Panel(
                "Placements",
                "per second",
                (
                    Query(_rate("lora_placements_total"), "into slots"),
                    Query(_rate("lora_merges_total"), "into the weights"),
                ),
            ),
        ),
        is_collapsed=True,
    ),
    Row(
        "Media",
        (
            Panel(
                "Prepared items",
                "per second",
                (Query(_rate("mm_prepared_items_total", "modality"), "{{modality}}"),),
            ),
            Panel(
                "Preparing an item",
                "seconds",
                (Query(_ratio("mm_preparation_seconds_total", "mm_prepared_items_total", "modality"), "{{modality}}"),),
                "Mean, waiting included.",
            ),
            Panel(
                "Encoding an item",
                "seconds",
                (Query(_ratio("mm_encode_seconds_total", "mm_encoded_items_total", "modality"), "{{modality}}"),),
                "Mean time of the tower.",
            ),
            Panel(
                "Cache hits",
                "share",
                (
                    Query(
                        _ratio("mm_cache_hits_total", "mm_cache_queries_total", "modality"), "prepared: {{modality}}"
                    ),
                    Query(_ratio("encoder_cache_hits_total", "encoder_cache_queries_total"), "encoded"),
                ),
            ),
            Panel("Cache of encoded media", "share", (Query("max(@encoder_cache_usage_perc)", "in use"),)),
        ),
        is_collapsed=True,
    ),
    Row(
        "Pooling",
        (
            Panel("Requests", "per second", (Query(_rate("pooling_requests_total", "task"), "{{task}}"),)),
            Panel(
                "Prompt tokens", "tokens per second", (Query(_rate("pooling_prompt_tokens_total", "task"), "{{task}}"),)
            ),
            Panel(
                "Latency, p95",
                "seconds",
                (Query(_quantile(0.95, "pooling_request_latency_seconds", "task, le"), "{{task}}"),),
            ),
        ),
        is_collapsed=True,
    ),
    Row(
        "Experts over ranks",
        (
            Panel(
                "Balancedness",
                "share",
                (Query("min by (engine) (@eplb_balancedness)", "engine {{engine}}"),),
                "Mean tokens of a rank over those of the fullest one.",
            ),
            Panel(
                "Tokens by rank",
                "tokens per second",
                (Query(_rate("eplb_rank_tokens_total", "rank"), "rank {{rank}}"),),
            ),
            Panel(
                "Moves",
                "count",
                (
                    Query(_increase("eplb_rebalances_total"), "rebalances"),
                    Query(_increase("eplb_moved_experts_total"), "experts"),
                ),
            ),
        ),
        is_collapsed=True,
    ),
)

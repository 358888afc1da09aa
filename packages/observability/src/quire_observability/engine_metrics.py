"""The engine's Prometheus metrics: hears what an engine client reports, answers scrapes.

Names are `PREFIX:name` with the names that dashboards of this field rely on, so that the prefix "vllm" serves them as
they are. Knows no engine, no web framework: `EngineMetrics` has the methods of `quire_engine.EngineListener`, and
whoever serves `/metrics` calls `exposition`.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from itertools import accumulate
from typing import Protocol

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from quire_interfaces import GRAMMAR_COMPILE_BOUNDS_S, ConfigError, FinishReason, SchedulerStats, sum_stats
from quire_interfaces.engine_watch import RequestRecord
from quire_observability.completions import CompletionGroups
from quire_observability.histogram import Histogram
from quire_observability.request_log import RequestLog, RequestTimes

__all__ = ["CONTENT_TYPE", "EngineMetrics", "RequestTimes", "current_requests"]

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
"""Of what `EngineMetrics.exposition` returns."""

_LATENCY_BOUNDS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 25, 50, 100, 250, 1000)
_TOKEN_BOUNDS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000, 200000, 500000)
_STEP_BOUNDS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384, 32768)
_SMALL_BOUNDS = (0, 1, 2, 5, 10, 20, 50, 128)

_HISTOGRAMS: dict[str, tuple[str, tuple[float, ...]]] = {
    "time_to_first_token_seconds": ("From arrival to the first token.", _LATENCY_BOUNDS_S),
    "inter_token_latency_seconds": ("Between consecutive tokens of a request.", _LATENCY_BOUNDS_S),
    "request_time_per_output_token_seconds": ("A request's mean time per token after the first.", _LATENCY_BOUNDS_S),
    "e2e_request_latency_seconds": ("From arrival to the end.", _LATENCY_BOUNDS_S),
    "request_queue_time_seconds": ("Waiting before the first step.", _LATENCY_BOUNDS_S),
    "request_prefill_time_seconds": ("From the first step to the first token.", _LATENCY_BOUNDS_S),
    "request_decode_time_seconds": ("From the first to the last token.", _LATENCY_BOUNDS_S),
    "request_inference_time_seconds": ("From the first step to the last token.", _LATENCY_BOUNDS_S),
    "request_prompt_tokens": ("Prompt tokens per request.", _TOKEN_BOUNDS),
    "request_generation_tokens": ("Output tokens per request.", _TOKEN_BOUNDS),
    "request_max_num_generation_tokens": ("Output tokens of the longest of n completions.", _TOKEN_BOUNDS),
    "request_prefill_kv_computed_tokens": ("Prompt tokens per request that no cache had.", _TOKEN_BOUNDS),
    "request_params_n": ("Completions asked for.", _SMALL_BOUNDS),
    "request_params_max_tokens": ("Output tokens allowed.", _TOKEN_BOUNDS),
    "request_num_preemptions": ("How often a request lost its place.", _SMALL_BOUNDS),
    "iteration_tokens_total": ("Tokens computed per step.", _STEP_BOUNDS),
}

_COUNTERS = {
    "prompt_tokens": ("num_prompt_tokens_total", "Prompt tokens of requests that reached their first output token."),
    "prompt_tokens_cached": ("num_cached_prompt_tokens_total", "Of prompt_tokens, those the prefix cache had."),
    "generation_tokens": ("num_generation_tokens_total", "Output tokens."),
    "num_preemptions": ("num_preemptions_total", "Requests that lost their place and were recomputed."),
    "prefix_cache_queries": ("prefix_cache_query_tokens_total", "Tokens looked up in the prefix cache."),
    "prefix_cache_hits": ("prefix_cache_hit_tokens_total", "Tokens found in the prefix cache."),
    "external_prefix_cache_queries": (
        "external_prefix_cache_query_tokens_total",
        "Tokens that were not in memory and looked up in a tier beside it.",
    ),
    "external_prefix_cache_hits": ("external_prefix_cache_hit_tokens_total", "Tokens that a tier brought."),
    "spec_decode_num_drafts": ("num_drafts_total", "Drafts verified."),
    "spec_decode_num_draft_tokens": ("num_draft_tokens_total", "Draft tokens verified."),
    "spec_decode_draft_seconds": ("draft_seconds_total", "Time that finding drafts took."),
    "grammar_cache_queries": ("num_grammar_queries_total", "Constraints on outputs that requests asked for."),
    "grammar_cache_hits": ("num_grammar_hits_total", "Of these, those whose grammar was there already."),
    "grammar_compile_failures": ("num_grammar_failures_total", "Schemas, patterns and grammars that were refused."),
    "encoder_cache_queries": ("encoder_cache_queries_total", "Media whose embeddings requests needed."),
    "encoder_cache_hits": ("encoder_cache_hits_total", "Of these, those whose embeddings were there already."),
    "spec_decode_num_accepted_tokens": ("num_accepted_tokens_total", "Draft tokens accepted."),
}
"""Metric -> (field of `SchedulerStats`, help)."""

_GAUGES = {
    "num_requests_running": ("num_running", "Requests in a row."),
    "num_requests_waiting": ("num_waiting", "Requests in the queue."),
    "spec_decode_saved_seconds": (
        "draft_saved_seconds",
        "Time that drafting saved against plain steps, by measurement; less than 0 where it lost.",
    ),
    "encoder_cache_usage_perc": ("encoder_cache_usage", "Used share of the cache of encoded media, 1 is full."),
    "kv_cache_usage_perc": ("kv_cache_usage", "Used share of the KV cache, 1 is full."),
}

current_requests: ContextVar[list[RequestTimes] | None] = ContextVar("current_requests", default=None)
"""Where to collect the engine's requests that this task makes; None does not collect them."""


class PreparedCounts(Protocol):
    """What is read of the media of one modality that were prepared (`quire_multimodal.MediaStats`)."""

    @property
    def num_queries(self) -> int: ...
    @property
    def num_hits(self) -> int: ...
    @property
    def num_items(self) -> int: ...
    @property
    def num_embeds(self) -> int: ...
    @property
    def num_seconds(self) -> float: ...


_PREPARED = {
    "mm_cache_queries": ("num_queries", "Media that prompts asked for."),
    "mm_cache_hits": ("num_hits", "Of these, those that were prepared, or being prepared, already."),
    "mm_prepared_items": ("num_items", "Media that were prepared."),
    "mm_prepared_embeds": ("num_embeds", "Embeddings that those take."),
    "mm_preparation_seconds": ("num_seconds", "Time that preparing them took, waiting included."),
}
"""Metric -> (attribute of `PreparedCounts`, help)."""


class _TenantTotals:
    """What the requests of one tenant took together."""

    __slots__ = ("num_cached_tokens", "num_generation_tokens", "num_prompt_tokens", "num_requests")

    def __init__(self) -> None:
        self.num_requests = self.num_prompt_tokens = self.num_cached_tokens = self.num_generation_tokens = 0

    def count(self, metrics: RequestTimes) -> None:
        """Add a request that ended."""
        self.num_requests += 1
        self.num_prompt_tokens += metrics.num_prompt_tokens
        self.num_cached_tokens += metrics.num_cached_tokens
        self.num_generation_tokens += metrics.num_generation_tokens


_TENANT_COUNTERS = {
    "requests": "Requests of a tenant (an API key) that ended.",
    "prompt_tokens": "Their prompt tokens.",
    "cached_tokens": "Their prompt tokens whose keys and values were there already.",
    "generation_tokens": "Their generated tokens.",
}


class _PoolingTotals:
    """What requests of one pooling task took together."""

    __slots__ = ("latency_s", "num_prompt_tokens")

    def __init__(self) -> None:
        self.num_prompt_tokens = 0
        self.latency_s = Histogram(_LATENCY_BOUNDS_S)


# Many attributes: what is counted of requests, of pooling, of tenants and of other engines is told together.
class EngineMetrics(Collector):
    """All metrics of an engine, or of the engines of one server (`of_engine`). One thread reports; scrapes may come
    from another.

    Args:
        prefix: First part of the names: "quire", or "vllm" for existing dashboards.
        registry: Where to register; None makes one of its own.
        labels: Labels of every sample, e.g. {"model_name": "demo", "engine": "0"}.

    Raises:
        ConfigError: the prefix or a label's name is none that Prometheus allows.
    """

    def __init__(
        self, prefix: str = "quire", registry: CollectorRegistry | None = None, labels: dict[str, str] | None = None
    ) -> None:
        if not re.fullmatch(r"[a-zA-Z_][a-zA-Z0-9_]*", prefix):
            raise ConfigError(
                f"metrics_prefix must be letters, digits and underscores, not beginning with a digit, got {prefix!r}",
                field="metrics_prefix",
            )
        self._prefix = prefix
        self._label_names: list[str] = []
        self._label_values: list[str] = []
        self.adapter_labels: Callable[[str], tuple[str, str]] = lambda name: (name, "")
        """The engine's name of an adapter -> its labels: the name its users know, and whose it is ("" for all)."""
        self.on_request_end: Callable[[RequestTimes], None] = lambda metrics: None
        """Hears of each request that ends."""
        self.prepared_media: Callable[[], Mapping[str, PreparedCounts]] = dict
        """What was prepared so far, by modality; nothing where the model takes text only."""
        self.requests = RequestLog()
        """The requests in flight, and the last ones that ended; of all engines."""
        self._completions = CompletionGroups()
        """Those of n > 1; of all engines, which may share the completions of a prompt."""
        self._sleep_level: int | None = None
        self._rank: int | None = None
        """Of the engine that reports here; None until one is asked for."""
        self._others: dict[int, EngineMetrics] = {}
        """Rank -> metrics of the other engines."""
        self.set_labels(**(labels or {}))
        self._stats = SchedulerStats()
        self._histograms = {name: Histogram(bounds) for name, (_, bounds) in _HISTOGRAMS.items()}
        self._time_to_first_token = self._histograms["time_to_first_token_seconds"]
        self._inter_token_latency = self._histograms["inter_token_latency_seconds"]
        self._iteration_tokens = self._histograms["iteration_tokens_total"]
        self._num_finished = dict.fromkeys(FinishReason, 0)
        self._pooling: dict[str, _PoolingTotals] = {}
        self._tenants: dict[str, _TenantTotals] = {}
        self._num_rejected = 0
        self._num_stalls = 0
        # A counter that appears with its first event shows no increase.
        self._num_restarts = dict.fromkeys(("SIGKILL", "exit", "failure"), 0)
        self._cache_config: dict[str, str] = {}
        self.registry = registry if registry is not None else CollectorRegistry()
        self.registry.register(self)

    def of_engine(self, rank: int) -> EngineMetrics:
        """Where the engine of this rank reports: these metrics themselves for the first one that is asked for. Those of
        the others are told beside them, with the rank as the label `engine`."""
        if self._rank is None:
            self._rank = rank
        if rank == self._rank:
            return self
        if rank not in self._others:
            labels = dict(zip(self._label_names, self._label_values, strict=True))
            self._others[rank] = EngineMetrics(self._prefix, labels={**labels, "engine": str(rank)})
            self._others[rank].on_request_end = lambda metrics: self.on_request_end(metrics)
            self._others[rank].requests, self._others[rank]._completions = self.requests, self._completions
        return self._others[rank]

    def set_labels(self, **labels: str) -> None:
        """Labels of every sample from now on (the model's name may be known only after the start).

        Raises:
            ConfigError: a name that Prometheus does not allow.
        """
        for name in labels:
            if not re.fullmatch(r"[a-zA-Z_][a-zA-Z0-9_]*", name) or name.startswith("__"):
                raise ConfigError(f"{name!r} is no label name: use letters, digits and underscores", field="labels")
        self._label_names, self._label_values = list(labels), list(labels.values())
        for rank, other in self._others.items():
            other.set_labels(**{**labels, "engine": str(rank)})

    def set_cache_config(self, **values: object) -> None:
        """What `cache_config_info` says, e.g. block_size=16, num_gpu_blocks=4096."""
        self._cache_config = {name: str(value) for name, value in values.items()}

    # Reports, as `quire_engine.EngineListener` makes them.

    def on_step(self, num_tokens: int, stats: SchedulerStats | None) -> None:
        """A step computed `num_tokens` (0: no step); stats come from time to time."""
        if num_tokens:
            self._iteration_tokens.observe(num_tokens)
        if stats is not None:
            self._stats = stats

    def on_added(self, metrics: RequestTimes) -> None:
        """A request was handed to the engine: it belongs to what `current_requests` collects."""
        self.requests.added(metrics)
        if metrics.n > 1:
            self._completions.added(metrics)
        current = current_requests.get()
        if current is not None:
            current.append(metrics)

    def on_first_token(self, time_to_first_token_s: float) -> None:
        """A request's first token arrived."""
        self._time_to_first_token.observe(time_to_first_token_s)

    def on_tokens(self, interval_s: float, num_tokens: int) -> None:
        """Further tokens arrived together, `interval_s` after the ones before."""
        self._inter_token_latency.observe(interval_s / num_tokens, num_tokens)

    def on_finished(self, metrics: RequestTimes, reason: FinishReason) -> None:
        """A request (one of its n completions) ended."""
        self._num_finished[reason] += 1
        self.on_request_end(metrics)
        if metrics.tenant:
            self._tenants.setdefault(metrics.tenant, _TenantTotals()).count(metrics)
        self.requests.finished(metrics, reason)
        observe = self._observe
        observe("request_prompt_tokens", metrics.num_prompt_tokens)
        observe("request_generation_tokens", metrics.num_generation_tokens)
        longest = metrics.num_generation_tokens if metrics.n == 1 else self._completions.ended(metrics)
        if longest is not None:
            observe("request_max_num_generation_tokens", longest)
        observe("request_params_n", metrics.n)
        observe("request_params_max_tokens", metrics.max_tokens)
        observe("request_num_preemptions", metrics.num_preemptions)
        observe("e2e_request_latency_seconds", metrics.finished_time_s - metrics.arrival_time_s)
        if metrics.scheduled_time_s == 0.0:
            return
        observe("request_queue_time_seconds", metrics.scheduled_time_s - metrics.arrival_time_s)
        if metrics.first_token_time_s == 0.0:
            return
        decode_s = metrics.last_token_time_s - metrics.first_token_time_s
        observe("request_prefill_time_seconds", metrics.first_token_time_s - metrics.scheduled_time_s)
        observe("request_prefill_kv_computed_tokens", metrics.num_prompt_tokens - metrics.num_cached_tokens)
        observe("request_decode_time_seconds", decode_s)
        observe("request_inference_time_seconds", metrics.last_token_time_s - metrics.scheduled_time_s)
        if metrics.num_generation_tokens > 1:
            observe("request_time_per_output_token_seconds", decode_s / (metrics.num_generation_tokens - 1))

    def on_pooled(self, task: str, num_prompt_tokens: int, latency_s: float) -> None:
        """A request was pooled for `task`, `latency_s` after it arrived. It counts among the finished ones, too."""
        totals = self._pooling.setdefault(task, _PoolingTotals())
        totals.num_prompt_tokens += num_prompt_tokens
        totals.latency_s.observe(latency_s)

    def on_rejected(self, metrics: RequestTimes) -> None:
        """The engine refused a request."""
        self._num_rejected += 1
        longest = self._completions.ended(metrics)
        if longest:
            self._observe("request_max_num_generation_tokens", longest)
        self.requests.rejected(metrics)

    def on_watched(self, records: Sequence[RequestRecord]) -> None:
        """Somebody watches the engine, and was told this of requests."""
        self.requests.note(records)

    def on_restart(self, reason: str) -> None:
        """The engine's process ended and is started again."""
        self._num_restarts[reason] = self._num_restarts.get(reason, 0) + 1

    def on_stall(self) -> None:
        """The engine stopped stepping though it has requests."""
        self._num_stalls += 1

    def on_sleep(self, level: int | None) -> None:
        """The engine went to sleep at this level, or was woken (None)."""
        self._sleep_level = level

    @property
    def stats(self) -> SchedulerStats:
        """The last statistics that the engine sent; those of several engines together."""
        return sum_stats([self._stats, *(other._stats for other in self._others.values())])

    @property
    def num_finished(self) -> int:
        """Requests that ended, in whatever way."""
        return sum(sum(each._num_finished.values()) for each in (self, *self._others.values()))

    def _observe(self, name: str, value: float) -> None:
        self._histograms[name].observe(value)

    # Scrapes.

    def exposition(self) -> bytes:
        """Everything in the registry, in Prometheus's text format (`CONTENT_TYPE`)."""
        return generate_latest(self.registry)

    def describe(self) -> Iterable[Metric]:
        """Nothing beforehand: names are made when they are collected."""
        return ()

    def collect(self) -> Iterator[Metric]:
        """All metrics as of now; the samples of several engines stand together."""
        families = {family.name: family for family in self._collect_own()}
        for other in self._others.values():
            other.adapter_labels, other._cache_config = self.adapter_labels, self._cache_config
            for family in other._collect_own():
                if family.name in families:
                    families[family.name].samples.extend(family.samples)
                else:
                    families[family.name] = family
        yield from families.values()

    def _collect_own(self) -> Iterator[Metric]:
        stats = self._stats
        for name, (field, text) in _GAUGES.items():
            yield self._gauge(name, text, getattr(stats, field))
        for name, (field, text) in _COUNTERS.items():
            yield self._counter(name, text, getattr(stats, field))
        yield from self._breakdowns(stats)
        yield self._counter("admission_rejections", "Requests the engine refused.", self._num_rejected)
        yield self._counter("engine_stalls", "Times that the engine stopped stepping with requests.", self._num_stalls)
        text = "Times that the engine's process was started again, by what ended it: a signal, its own exit, a failure."
        yield self._labelled("engine_restarts", text, "reason", self._num_restarts.items())
        yield self._request_success()
        for name, (text, _) in _HISTOGRAMS.items():
            family = HistogramMetricFamily(self._name(name), text, labels=self._label_names)
            histogram = self._histograms[name]
            family.add_metric(self._label_values, buckets=histogram.buckets(), sum_value=histogram.sum)
            yield family
        if self._cache_config:
            names = [*self._label_names, *self._cache_config]
            info = GaugeMetricFamily(self._name("cache_config_info"), "Settings of the KV cache.", labels=names)
            info.add_metric([*self._label_values, *self._cache_config.values()], 1)
            yield info

    def _breakdowns(self, stats: SchedulerStats) -> Iterator[Metric]:
        """What a label splits into parts that add up to a metric without it."""
        waiting = GaugeMetricFamily(
            self._name("num_requests_waiting_by_reason"),
            "Requests in the queue: for want of room (capacity), or for something of their own (deferred).",
            labels=[*self._label_names, "reason"],
        )
        num_deferred = stats.num_waiting_deferred
        for reason, count in (("capacity", stats.num_waiting - num_deferred), ("deferred", num_deferred)):
            waiting.add_metric([*self._label_values, reason], count)
        yield waiting
        num_cached = stats.num_cached_prompt_tokens_total
        num_external = stats.num_external_prompt_tokens_total
        sources = (
            ("local_compute", stats.num_prompt_tokens_total - num_cached),
            ("local_cache_hit", num_cached - num_external),
            ("external_kv_transfer", num_external),
        )
        yield self._labelled("prompt_tokens_by_source", "Prompt tokens, computed or from a cache.", "source", sources)
        hits = (
            ("device", stats.prefix_cache_hit_tokens_total),
            ("external_unspecified", stats.external_prefix_cache_hit_tokens_total),
        )
        text = "Tokens found in the prefix cache, in memory (device) or by a tier beside it, counted at admission."
        yield self._labelled("prompt_tokens_cached_by_source", text, "source", hits)
        yield self._sleep_state()
        positions = ((str(index), count) for index, count in enumerate(stats.num_accepted_tokens_per_pos_total))
        text = "Drafts whose token at this position, from 0, was accepted."
        yield self._labelled("spec_decode_num_accepted_tokens_per_pos", text, "position", positions)
        text = "Kernels compiled while serving, which should have been there."
        yield self._labelled("jit_compilations", text, "kernel", stats.jit_compilations_total.items())
        text = "Media that towers have read."
        yield self._labelled("mm_encoded_items", text, "modality", stats.num_encoded_items_total.items())
        text = "Embeddings that towers have made."
        yield self._labelled("mm_encoded_embeds", text, "modality", stats.num_encoded_embeds_total.items())
        text = "Time that towers took to read media."
        yield self._labelled("mm_encode_seconds", text, "modality", stats.encode_seconds_total.items())
        prepared = self.prepared_media()
        for name, (attribute, text) in _PREPARED.items():
            counts = ((modality, getattr(each, attribute)) for modality, each in prepared.items())
            yield self._labelled(name, text, "modality", counts)
        if self._pooling:
            yield from self._pooled()
        if self._tenants:
            yield from self._tenant_counters()
        if stats.num_adapter_slots:
            yield from self._adapters(stats)
        if stats.expert_rank_tokens_total:
            yield from self._experts(stats)
        if stats.grammar_compile_counts_total:
            yield self._grammar_compile_seconds(stats)

    def _pooled(self) -> Iterator[Metric]:
        pooling = sorted(self._pooling.items())
        counts = ((task, totals.latency_s.count) for task, totals in pooling)
        yield self._labelled("pooling_requests", "Requests that were pooled.", "task", counts)
        counts = ((task, totals.num_prompt_tokens) for task, totals in pooling)
        yield self._labelled("pooling_prompt_tokens", "Prompt tokens of requests that were pooled.", "task", counts)
        family = HistogramMetricFamily(
            self._name("pooling_request_latency_seconds"),
            "From arrival to the pooled output.",
            labels=[*self._label_names, "task"],
        )
        for task, totals in pooling:
            histogram = totals.latency_s
            family.add_metric([*self._label_values, task], buckets=histogram.buckets(), sum_value=histogram.sum)
        yield family

    def _tenant_counters(self) -> Iterator[Metric]:
        for name, text in _TENANT_COUNTERS.items():
            counts = ((tenant, getattr(totals, f"num_{name}")) for tenant, totals in self._tenants.items())
            yield self._labelled(f"tenant_{name}", text, "tenant", counts)

    def _adapters(self, stats: SchedulerStats) -> Iterator[Metric]:
        yield self._gauge("lora_adapters_running", "Adapters that running requests use.", stats.num_adapters_running)
        yield self._gauge("lora_adapter_slots", "Adapters that can be in use at once.", stats.num_adapter_slots)
        yield self._counter("lora_placements", "Adapters put into a slot.", stats.num_adapter_placements_total)
        yield self._counter("lora_merges", "Adapters put into the weights.", stats.num_adapter_merges_total)
        requests = (("running", stats.adapter_requests_running), ("waiting", stats.adapter_requests_waiting))
        for state, counts in requests:
            family = GaugeMetricFamily(
                self._name(f"lora_requests_{state}"),
                f"Requests with an adapter that are {state}.",
                labels=[*self._label_names, "adapter", "tenant"],
            )
            for name, count in counts.items():
                family.add_metric([*self._label_values, *self.adapter_labels(name)], count)
            yield family

        info = GaugeMetricFamily(
            self._name("lora_requests_info"),
            "Adapters of running and waiting requests, comma-separated; the value is the time of the scrape.",
            labels=[*self._label_names, "max_lora", "running_lora_adapters", "waiting_lora_adapters"],
        )
        lists = [",".join(self.adapter_labels(name)[0] for name in sorted(counts)) for _, counts in requests]
        info.add_metric([*self._label_values, str(stats.num_adapter_slots), *lists], time.time())
        yield info

    def _sleep_state(self) -> GaugeMetricFamily:
        """The level that was asked for. Weights stay or are discarded, so that `weights_offloaded` is never 1."""
        level = self._sleep_level
        family = GaugeMetricFamily(
            self._name("engine_sleep_state"),
            "1 for what holds: awake; asleep with the memory of the KV cache given back (kv_cache_released), or with "
            "that of the weights as well (discard_all); they are never kept elsewhere (weights_offloaded).",
            labels=[*self._label_names, "sleep_state"],
        )
        states = {"awake": level is None, "kv_cache_released": level == 1, "discard_all": level == 2}
        for state in (*states, "weights_offloaded"):
            family.add_metric([*self._label_values, state], float(states.get(state, False)))
        return family

    def _experts(self, stats: SchedulerStats) -> Iterator[Metric]:
        text = "Mean tokens of a rank over those of the fullest one in the last steps: 1 is balanced."
        yield self._gauge("eplb_balancedness", text, stats.expert_balancedness)
        yield self._counter("eplb_rebalances", "Times that experts were moved.", stats.num_expert_rebalances_total)
        yield self._counter("eplb_moved_experts", "Experts that came to another rank.", stats.num_moved_experts_total)
        text = "Pairs of token and expert that a rank computed."
        yield self._labelled("eplb_rank_tokens", text, "rank", stats.expert_rank_tokens_total.items())

    def _grammar_compile_seconds(self, stats: SchedulerStats) -> HistogramMetricFamily:
        """The engine counts these itself: its compiles run beside its loop, where no request hears of them."""
        text = "Compiling a schema, pattern or grammar."
        family = HistogramMetricFamily(self._name("grammar_compile_seconds"), text, labels=self._label_names)
        bounds = [*map(str, GRAMMAR_COMPILE_BOUNDS_S), "+Inf"]
        buckets = list(zip(bounds, map(float, accumulate(stats.grammar_compile_counts_total)), strict=True))
        family.add_metric(self._label_values, buckets=buckets, sum_value=stats.grammar_compile_seconds_total)
        return family

    def _request_success(self) -> CounterMetricFamily:
        counts = ((reason.value, count) for reason, count in self._num_finished.items())
        return self._labelled("request_success", "Requests that ended, by reason.", "finished_reason", counts)

    def _labelled(self, name: str, text: str, label: str, counts: Iterable[tuple[str, float]]) -> CounterMetricFamily:
        """A counter with one more label."""
        family = CounterMetricFamily(self._name(name), text, labels=[*self._label_names, label])
        for value, count in counts:
            family.add_metric([*self._label_values, value], count)
        return family

    def _gauge(self, name: str, text: str, value: float) -> GaugeMetricFamily:
        family = GaugeMetricFamily(self._name(name), text, labels=self._label_names)
        family.add_metric(self._label_values, value)
        return family

    def _counter(self, name: str, text: str, value: float) -> CounterMetricFamily:
        family = CounterMetricFamily(self._name(name), text, labels=self._label_names)
        family.add_metric(self._label_values, value)
        return family

    def _name(self, name: str) -> str:
        return f"{self._prefix}:{name}"

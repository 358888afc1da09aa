"""The situations in which a request can be computed, and an engine around a network that brings them about.

Scheduler, KV cache, runner, sampler and engine core are the real ones, joined by hand, so that the network is loaded
once for all situations and memory can be scarce on purpose.
"""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, cast

from torch import Tensor

from quire_engine import EngineConfig, EngineCore, EngineInfo, EngineParts
from quire_interfaces import AdmissionRule, ModelRunnerOutput, PromptMedia, Request, SamplingParams, SchedulerOutput
from quire_kv_cache import KVCacheConfig, KVCacheManager, plan_kv_cache
from quire_runner import ModelRunner, RunnerConfig, ThreadedExecutor
from quire_scheduler import EncoderRule, MediaRule, Scheduler, SchedulerConfig
from quire_testkit.parity.encoder_prompts import EncoderInput, Spectrogram

__all__ = ["SITUATIONS", "Situation", "Watched", "serve"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Situation:
    """One way for the two watched requests to be computed."""

    chunk: int = 0
    """Most prompt tokens per step, 0 for the whole prompt."""
    num_strangers: int = 0
    """Requests of other lengths and sampling parameters in the same steps."""
    is_warm: bool = False
    """The prompts were served before: the prefix cache has them."""
    preempt_after: tuple[int, ...] = ()
    """Steps after which everything that runs is preempted and the prefix cache emptied."""
    depth: int = 0
    """Steps that are scheduled ahead of the device."""
    block_size: int = 8


SITUATIONS: dict[str, Situation] = {
    "whole prefill": Situation(),
    "chunks of 1": Situation(chunk=1, block_size=1),
    "chunks of 7": Situation(chunk=7),
    "chunks of 64": Situation(chunk=64, block_size=16),
    "with strangers": Situation(num_strangers=8),
    "prefix hit": Situation(is_warm=True),
    "preempted": Situation(preempt_after=(10, 30), num_strangers=3),
    "asynchronous": Situation(depth=1),
    "all at once": Situation(depth=1, chunk=7, num_strangers=8, preempt_after=(15,), is_warm=True),
}


NUM_EMBEDS = 150
"""Embeddings that the runner keeps: not those of all items."""
SEED = 11
SEEDED = SamplingParams(temperature=0.9, top_p=0.95, seed=SEED, ignore_eos=True)
"""Of the seeded request."""


@dataclass(slots=True)
class Watched:
    """What one run showed of a request."""

    token_ids: list[int]
    num_cached_tokens: int
    num_preemptions: int
    logits: dict[int, Tensor] = field(default_factory=dict)
    """Position -> logits [vocab_size] of the token after it."""


class _RecordingRunner:
    """Passes steps on to a `ModelRunner` and files the logits it shows under the request they belong to."""

    def __init__(self) -> None:
        self.inner: ModelRunner | None = None
        self.logits: dict[str, dict[int, Tensor]] = defaultdict(dict)
        self._holder: dict[int, str] = {}

    def tap(self, rows: list[int], positions: list[int], logits: Tensor) -> None:
        for row, position, values in zip(rows, positions, logits.clone(), strict=True):
            self.logits[self._holder[row]][position] = values

    def execute(self, output: SchedulerOutput) -> Future[ModelRunnerOutput]:
        assert self.inner is not None
        self._note(output)
        return self.inner.execute(output)

    def run(self, output: SchedulerOutput) -> ModelRunnerOutput:
        assert self.inner is not None
        self._note(output)
        return self.inner.run(output)

    def _note(self, output: SchedulerOutput) -> None:
        self._holder.update({new.row: new.request_id for new in output.new_rows})

    def close(self) -> None:
        assert self.inner is not None
        self.inner.close()


def serve(
    network: Any,
    situation: Situation,
    prompt: Sequence[int],
    num_tokens: int,
    encoder: EncoderInput = (),
    media: PromptMedia | None = None,
    others: Sequence[tuple[list[int], PromptMedia]] = (),
) -> dict[str, Watched]:
    """Serve the prompt as a greedy and as a seeded request, named so.

    Args:
        network: A network of `quire_models`, in any dtype.
        num_tokens: Output tokens of each.
        encoder: What its encoder reads, if it has one; strangers then have others.
        media: Of the prompt.
        others: Prompts with other media, for strangers.

    Returns:
        Name of the request -> what was seen of it.
    """
    max_model_len = max(map(len, (prompt, *(tokens for tokens, _ in others)))) + num_tokens + 16
    specs = network.config.kv_cache_specs(situation.block_size, dtype=network.cache_dtype)
    num_blocks = (2 + situation.num_strangers + len(others)) * (max_model_len // situation.block_size + 4) * len(specs)
    plan = plan_kv_cache(specs, num_blocks=num_blocks)
    recorder = _RecordingRunner()
    recorder.inner = ModelRunner.for_model(
        network,
        plan,
        RunnerConfig(max_num_seqs=32, max_model_len=max_model_len),
        on_logits=recorder.tap,
    )
    cache = KVCacheManager(plan, KVCacheConfig(block_size=situation.block_size))
    config = SchedulerConfig(max_num_seqs=32, max_model_len=max_model_len, long_prefill_token_threshold=situation.chunk)
    encoder_rule = EncoderRule(network.config.max_encoder_len, config.max_num_batched_tokens)
    rules: list[AdmissionRule] = [encoder_rule]
    if (towers := network.config.media) is not None:
        whole = towers.is_bidirectional
        rules.append(MediaRule(NUM_EMBEDS, NUM_EMBEDS, config.max_num_batched_tokens, keeps_spans_whole=whole))
    scheduler = Scheduler(config, cache, rules=rules)
    parts = EngineParts(
        scheduler=scheduler,
        # Of a runner, an executor that reads no results apart calls what the recorder passes on.
        executor=ThreadedExecutor(cast(ModelRunner, recorder)) if situation.depth > 0 else recorder,
        info=EngineInfo(max_model_len=max_model_len, vocab_size=network.config.vocab_size),
    )
    core = EngineCore(parts, EngineConfig(async_scheduling=situation.depth > 0))
    watched = _requests(situation, prompt, num_tokens, network.config.vocab_size, core, encoder, media, others)
    steps = 0
    while core.has_requests():
        core.step()
        steps += 1
        if steps in situation.preempt_after:
            core.collect_all()
            assert core.reset_prefix_cache(preempt_running=True), "running requests could not be preempted"
        cache.check_integrity()
    core.close()
    usage = cache.usage()
    assert usage.num_free_blocks == usage.num_total_blocks, "blocks are still held after the last request"
    return {
        each.request_id: Watched(
            each.output_token_ids, each.num_cached_tokens, each.num_preemptions, recorder.logits[each.request_id]
        )
        for each in watched
    }


def _requests(
    situation: Situation,
    prompt: Sequence[int],
    num_tokens: int,
    vocab_size: int,
    core: EngineCore,
    encoder: EncoderInput,
    media: PromptMedia | None,
    others: Sequence[tuple[list[int], PromptMedia]],
) -> list[Request]:
    """Add the requests of a situation, the strangers before and after the watched ones; returns the watched."""

    def request(
        name: str,
        tokens: Sequence[int],
        params: SamplingParams,
        seed: int,
        max_tokens: int,
        media: PromptMedia | None = None,
    ) -> Request:
        is_stranger = name.startswith("stranger")
        if isinstance(encoder, Spectrogram):
            encoder_tokens, media = [0] * len(encoder), encoder.other if is_stranger else encoder.media
        else:
            encoder_tokens = list(tokens[::-1] if encoder and is_stranger else encoder)
        return Request(
            request_id=name,
            prompt_token_ids=list(tokens),
            encoder_token_ids=encoder_tokens,
            sampling_params=params,
            seed=seed,
            max_tokens=max_tokens,
            media=media,
            cache_extra_keys=() if media is None else media.extra_keys,
        )

    if situation.is_warm:
        core.add_request(request("earlier", prompt, SamplingParams(temperature=0), 1, 1, media))
        while core.has_requests():
            core.step()
    watched = [
        request("greedy", prompt, SamplingParams(temperature=0, ignore_eos=True), 1, num_tokens, media),
        request("seeded", prompt, SEEDED, SEED, num_tokens, media),
    ]
    strangers = [
        request(
            f"stranger-{number}",
            random.Random(number).choices(range(3, vocab_size), k=1 + number * 5),
            SamplingParams(temperature=1.0, top_k=number, ignore_eos=True),
            number,
            5 + 4 * number,
        )
        for number in range(situation.num_strangers)
    ]
    if situation.num_strangers:
        strangers += [
            request(f"seer-{number}", tokens, SamplingParams(temperature=1.0, ignore_eos=True), number, 9, other)
            for number, (tokens, other) in enumerate(others)
        ]
    for each in [*strangers[::2], *watched, *strangers[1::2]]:
        core.add_request(each)
    return watched

"""An engine without weights: the real scheduler and KV cache over a `FakeExecutor`, as a factory for engine processes.

For tests of engines, clients and servers. Needs quire_engine, quire_scheduler and quire_kv_cache, which the tests that
use it declare. Faults can be asked for by the names of requests: one whose id begins with "raise" makes its step raise,
"fail" fails alone, "exit" ends the process, "hang" stops the step for good.
"""

from __future__ import annotations

import dataclasses
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from quire_engine import EngineInfo, EngineParts
from quire_interfaces import (
    ConfigError,
    FullAttentionSpec,
    KVCacheGroup,
    KVCachePlan,
    ModelRunnerOutput,
    PoolingTask,
    RequestError,
    SchedulerOutput,
)
from quire_kv_cache import KVCacheConfig, KVCacheManager
from quire_scheduler import EncoderRule, Scheduler, SchedulerConfig, SharedPromptRule
from quire_testkit.fake_runner import FakeExecutor, FakeRunner

__all__ = ["FACTORY", "FakeEngineConfig", "build_fake_engine", "fake_engine_factory"]

FACTORY = "quire_testkit.fake_engine:fake_engine_factory"


@dataclass(frozen=True, kw_only=True)
class FakeEngineConfig:
    """Sizes of a fake engine."""

    num_blocks: int = 256
    """KV cache blocks, without the null block."""
    block_size: int = 16
    max_model_len: int = 1024
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 512
    max_queued_requests: int = 1024
    policy: str = "fcfs"
    num_draft_tokens: int = 0
    first_token_id: int = 0
    num_token_ids: int = 1000
    vocab_size: int = 1000
    pooling_tasks: tuple[PoolingTask, ...] = ()
    """Tasks of pooling requests."""
    runner: Literal["generate", "pooling"] = "generate"
    """What `EngineInfo.runner` says: whether text is generated beside pooling."""
    seed: int = 0
    step_time_s: float = 0.0
    check_kv: bool = True
    """Strict checks of the KV; quadratic in the length of requests, switch off to measure."""


class FaultyExecutor(FakeExecutor):
    """A `FakeExecutor` that misbehaves for requests with certain names (see the module)."""

    def execute(self, output: SchedulerOutput) -> Future[ModelRunnerOutput]:
        for request_id in output.request_ids:
            if request_id.startswith("raise"):
                self.runner.raise_on.add(request_id)
            elif request_id.startswith("fail"):
                self.runner.fail_on[request_id] = "asked to fail"
            elif request_id.startswith("exit"):
                print("the fake engine exits as asked", flush=True)
                os._exit(3)
            elif request_id.startswith("hang"):
                return Future()
        return super().execute(output)


def build_fake_engine(config: FakeEngineConfig | None = None) -> EngineParts:
    """Scheduler, KV cache and fake executor, put together."""
    config = config or FakeEngineConfig()
    spec = FullAttentionSpec(block_size=config.block_size, num_kv_heads=1, head_dim=1, dtype="bfloat16")
    plan = KVCachePlan(
        groups=(KVCacheGroup(spec=spec, layer_names=("fake",)),),
        num_blocks=config.num_blocks + 1,
        tensor_block_bytes=(spec.block_bytes,),
    )
    allocator = KVCacheManager(plan, KVCacheConfig(block_size=config.block_size))
    scheduler = Scheduler(
        SchedulerConfig(
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_num_seqs=config.max_num_seqs,
            max_model_len=config.max_model_len,
            max_queued_requests=config.max_queued_requests,
            policy=config.policy,
            num_speculative_tokens=config.num_draft_tokens,
        ),
        allocator,
        rules=(SharedPromptRule(), EncoderRule(0, config.max_num_batched_tokens)),
    )
    runner = FakeRunner(
        num_rows=config.max_num_seqs,
        block_sizes=(config.block_size,),
        num_blocks=config.num_blocks + 1,
        seed=config.seed,
        first_token_id=config.first_token_id,
        num_token_ids=config.num_token_ids,
        max_model_len=config.max_model_len,
        num_draft_tokens=config.num_draft_tokens,
        check_kv=config.check_kv,
    )
    info = EngineInfo(
        model="fake",
        max_model_len=config.max_model_len,
        vocab_size=config.vocab_size,
        pooling_tasks=tuple(config.pooling_tasks),
        runner=config.runner,
        cached_pooling_tasks=tuple(config.pooling_tasks),
        embedding_size=2 if config.pooling_tasks else 0,
        num_blocks=config.num_blocks,
        block_size=config.block_size,
        max_num_seqs=config.max_num_seqs,
        dtype="none",
        memory_bytes={"kv cache": config.num_blocks * spec.block_bytes},
        choices={"executor": "fake: tokens are a function of seed and position"},
    )
    return EngineParts(
        scheduler=scheduler,
        executor=FaultyExecutor(runner, step_time_s=config.step_time_s),
        info=info,
        check_integrity=allocator.check_integrity,
        collective_rpc=_collective_rpc,
        reconfigure=partial(_reconfigure, scheduler, scheduler.config),
        kv_cache=allocator,
    )


def _reconfigure(scheduler: Scheduler, start: SchedulerConfig, values: Mapping[str, Any]) -> None:
    names = {field.name for field in dataclasses.fields(start)}
    scheduler.reconfigure(dataclasses.replace(start, **{name: each for name, each in values.items() if name in names}))


def _collective_rpc(method: str, arguments: Sequence[Any], named: Mapping[str, Any]) -> list[Any]:
    """What two ranks that repeat what they are told would return; they refuse to "refuse"."""
    if method == "refuse":
        raise RequestError("there is no method 'refuse'", param="method")
    return [{"rank": rank, "method": method, "args": list(arguments), "kwargs": dict(named)} for rank in (0, 1)]


def fake_engine_factory(config: Mapping[str, Any], report: Callable[[str, float], None]) -> EngineParts:
    """An `EngineFactory`: `config` holds fields of `FakeEngineConfig`, or "fault" to fail at the start.

    Raises:
        ConfigError: an unknown field.
    """
    values = dict(config)
    fault = values.pop("fault", None)
    report("pretending to load", 0.5)
    if fault == "exit":
        print("the fake engine exits at the start as asked", flush=True)
        os._exit(7)
    elif fault == "hang":
        threading.Event().wait()
    elif fault is not None:
        raise RuntimeError(f"asked to fail: {fault}")
    known = {field.name for field in dataclasses.fields(FakeEngineConfig)}
    for name in values:
        if name not in known:
            raise ConfigError(f"a fake engine has no setting {name!r}; it has {', '.join(sorted(known))}", field=name)
    return build_fake_engine(FakeEngineConfig(**values))

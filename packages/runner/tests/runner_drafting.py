"""Scheduler and runner around a network and what drafts for it, and requests for them."""

from __future__ import annotations

from collections import deque
from typing import Any

from runner_harness import make_request

from quire_interfaces import Executor, Request
from quire_kv_cache import KVCacheConfig, KVCacheManager, plan_kv_cache
from quire_models import Network
from quire_runner import ModelRunner, RunnerConfig, ThreadedExecutor
from quire_scheduler import Scheduler, SchedulerConfig

NUM_DRAFTS = 3
NUM_NODES = 9


class Engine:
    """Scheduler and runner around a network and what drafts for it; remembers every proposal."""

    def __init__(self, model: Network, draft: Network | None = None, *, depth: int = 0, **more: Any) -> None:
        plan = plan_kv_cache(model.config.kv_cache_specs(4, "float32"), num_blocks=more.get("num_blocks", 300))
        topk = more.get("topk", 1)
        num_drafts = 0 if draft is None else NUM_DRAFTS if topk == 1 else NUM_NODES
        limits = {
            "max_num_seqs": 8,
            "max_model_len": more.get("max_model_len", 128),
            "max_num_batched_tokens": more.get("budget", 64),
            "num_speculative_tokens": num_drafts,
        }
        sizes = more.get("graph_sizes", ())
        config = RunnerConfig(**limits, draft_depth=NUM_DRAFTS, draft_topk=topk, cuda_graph_sizes=sizes)
        runner = ModelRunner.for_model(
            model,
            plan,
            config,
            draft_network=draft,
            draft_controller=more.get("controller"),
            capture=more.get("capture"),
        )
        self.executor: Executor = runner
        if depth > 0:
            self.executor = threads = ThreadedExecutor(runner)
            threads.prepare(runner.learn_draft_costs)
        else:
            runner.learn_draft_costs()
        self.manager = KVCacheManager(plan, KVCacheConfig(block_size=4))
        ahead = topk * NUM_DRAFTS if draft else 0
        self.scheduler = Scheduler(SchedulerConfig(**limits, num_lookahead_tokens=ahead), self.manager)
        self.depth = depth
        self.proposals: list[tuple[list[int], list[int]]] = []
        """(all tokens of the request, what was proposed to follow)."""
        self.parents: list[list[int] | None] = []
        """Of each proposal, if it is a tree."""

    def run(self, *requests: Request) -> dict[str, list[int]]:
        by_id = {request.request_id: request for request in requests}
        for request in requests:
            self.scheduler.add_request(request)
        steps: deque[Any] = deque()
        while self.scheduler.has_requests():
            while len(steps) <= self.depth and (output := self.scheduler.schedule()) is not None:
                steps.append((output, self.executor.execute(output)))
            output, future = steps.popleft()
            result = future.result(timeout=60)
            self.scheduler.update(output, result)
            for row, name in zip(output.rows, output.request_ids, strict=True):
                if row in result.draft_token_ids and not by_id[name].is_finished:
                    request = by_id[name]
                    known = request.prompt_token_ids + request.output_token_ids
                    self.proposals.append((known, result.draft_token_ids[row]))
                    self.parents.append(result.draft_parents.get(row))
        self.manager.check_integrity()
        return {name: request.output_token_ids for name, request in by_id.items()}

    @property
    def acceptance(self) -> float:
        stats = self.scheduler.stats()
        return stats.num_accepted_tokens_total / max(1, stats.num_draft_tokens_total)


def requests(temperatures: tuple[float, ...] = (0.0, 0.8, 0.0, 1.1, 0.0), **params: Any) -> list[Request]:
    return [
        make_request(
            f"r{i}", [(7 * i + j * j) % 101 for j in range(5 + 9 * i)], max_tokens=16, seed=i, temperature=t, **params
        )
        for i, t in enumerate(temperatures)
    ]


SITUATIONS: dict[str, dict[str, Any]] = {
    "together": {},
    "chunks of prompts": {"budget": 7},
    "asynchronous": {"depth": 1, "budget": 16},
    "preemption": {"num_blocks": 27},
}


def runner_of(engine: Engine) -> Any:
    """The runner behind the engine's executor, which is one itself where steps run in the caller."""
    return getattr(engine.executor, "_runner", engine.executor)

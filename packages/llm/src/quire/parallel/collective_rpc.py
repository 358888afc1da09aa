"""Calls that every rank of an engine answers between two steps (`/collective_rpc`, `LLM.collective_rpc`): a fixed list.

Results are plain data. Loads torch only when a call needs it.
"""

from __future__ import annotations

import inspect
import os
import resource
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quire.parallel.data_parallel import engine_ranks
from quire.parallel.tensor_parallel import mesh_of
from quire_distributed.rank_executor import RankExecutor
from quire_interfaces import Executor, RequestError, SchedulerOutput
from quire_interfaces.platforms import platform_of
from quire_runner.profiler_config import ProfilerConfig

if TYPE_CHECKING:
    from quire.config import QuireConfig
    from quire_models.layers.expert_parallel import ExpertBalancer
    from quire_runner.profiler import StepProfiler
    from quire_runner.protocols import RunsSteps

__all__ = ["RANK_CALLS", "CollectiveRPC", "RankCalls"]


class RankCalls:
    """What one rank answers.

    Args:
        config: Settings of the engine.
        rank: Of the engine's ranks.
        runner: Runs the rank's steps; None where they cannot be counted.
    """

    balancer: ExpertBalancer | None = None
    """Moves experts between ranks; None where they stay where they are."""

    def __init__(self, config: QuireConfig, rank: int = 0, runner: RunsSteps | None = None) -> None:
        self._config, self._rank, self._runner = config, rank, runner
        self._profiler: StepProfiler | None = None

    def __call__(self, method: str, arguments: Sequence[Any], named: Mapping[str, Any]) -> Any:
        """Do one of `RANK_CALLS`.

        Raises:
            RequestError: there is no such call, or it takes other arguments.
        """
        call = RANK_CALLS.get(method)
        if call is None:
            raise RequestError(
                f"there is no method {method!r} for all ranks; there are {', '.join(sorted(RANK_CALLS))}",
                param="method",
            )
        try:
            inspect.signature(call).bind(self, *arguments, **named)
        except TypeError as error:
            raise RequestError(f"{method}: {error}", param="args") from None
        return call(self, *arguments, **named)

    @property
    def place(self) -> dict[str, int]:
        """Rank among all of the engine, and on each axis."""
        mesh = mesh_of(self._config.parallel, self._rank)
        return {
            "rank": self._rank,
            "dp_rank": engine_ranks(self._config.data_parallel).first,
            "pp_rank": self._rank // mesh.tp,
            "tp_rank": self._rank % mesh.tp,
        }

    def _check_health(self) -> None:
        """Nothing: who answers is there."""

    def _rank_info(self) -> dict[str, Any]:
        """Where the rank runs."""
        import torch

        device = self._config.runner.device
        platform = platform_of(device)
        return {
            **self.place,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "device": device,
            "device_name": platform.description(device) if platform.module else platform.name,
            "torch_version": str(torch.__version__),
            "torch_num_threads": torch.get_num_threads(),
            "num_threads": threading.active_count(),
        }

    def _memory_usage(self) -> dict[str, int]:
        """Bytes of memory, of the process and of torch's allocator on the device."""
        usage = {"rank": self._rank, "rss_bytes": _resident_bytes()}
        platform = platform_of(self._config.runner.device)
        if platform.module:
            runtime, device = platform.runtime(), platform.torch_device(self._config.runner.device)
            usage["allocated_bytes"] = runtime.memory_allocated(device)
            usage["reserved_bytes"] = runtime.memory_reserved(device)
            usage["max_allocated_bytes"] = runtime.max_memory_allocated(device)
        return usage

    def _start_profile(self, prefix: str | None = None) -> None:
        if self._profiler is None:
            from quire_runner.profiler import StepProfiler

            place = self.place
            name = f"dp{place['dp_rank']}_pp{place['pp_rank']}_tp{place['tp_rank']}_rank{place['rank']}"
            config = ProfilerConfig.of(self._config.runner.profiler_config or {})
            self._profiler = StepProfiler(config, self._config.runner.device, name)
        if self._profiler.counts_steps and self._runner is None:
            raise RequestError(
                "steps of this engine are not counted: leave delay_iterations and max_iterations of --profiler-config "
                "out",
                code="unsupported",
            )
        self._profiler.start(prefix)
        if self._profiler.counts_steps and self._runner is not None:
            vars(self._runner)["launch"] = _CountedLaunch(self._profiler, self._runner.launch)

    def _stop_profile(self) -> list[str]:
        """Paths of the files, on the rank's host."""
        if self._profiler is None:
            raise RequestError("the profiler does not run: start it first", code="not_running")
        if self._runner is not None:
            vars(self._runner).pop("launch", None)  # what counted the steps
        return self._profiler.stop()

    def _profile(self, is_start: bool = True, profile_prefix: str | None = None) -> list[str] | None:
        """The two before, in vLLM's form."""
        if not is_start:
            return self._stop_profile()
        self._start_profile(profile_prefix)
        return None

    def _expert_load(self) -> dict[str, Any]:
        """How the experts of the rank's layers are loaded and placed."""
        balancer = self._experts()
        return {
            "rank": self._rank,
            "balancedness": balancer.balancedness,
            "rank_tokens": balancer.rank_tokens.tolist(),
            "layers": balancer.load(),
        }

    def _rebalance_experts(self) -> int:
        """Number of experts that came to another rank."""
        return self._experts().rebalance()

    def _experts(self) -> ExpertBalancer:
        if self.balancer is None:
            raise RequestError(
                "experts are not counted and moved here: start with --enable-expert-parallel and --enable-eplb",
                code="unsupported",
            )
        return self.balancer


class _CountedLaunch:
    """`launch` of a runner while steps say when to record: it stands before the method of the class."""

    def __init__(self, profiler: StepProfiler, launch: Callable[[SchedulerOutput], Any]) -> None:
        self._profiler, self._launch = profiler, launch

    def __call__(self, output: SchedulerOutput) -> Any:
        self._profiler.before_step()
        return self._launch(output)


def _resident_bytes() -> int:
    """Of this process; the most that it has had where the system does not tell the present number."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


RANK_CALLS: dict[str, Callable[..., Any]] = {
    "check_health": RankCalls._check_health,
    "expert_load": RankCalls._expert_load,
    "memory_usage": RankCalls._memory_usage,
    "profile": RankCalls._profile,
    "rank_info": RankCalls._rank_info,
    "rebalance_experts": RankCalls._rebalance_experts,
    "start_profile": RankCalls._start_profile,
    "stop_profile": RankCalls._stop_profile,
}
"""Name -> call."""


class CollectiveRPC:
    """Has all ranks of an engine do a call; to be called between two steps, by the thread that runs them.

    Args:
        config: Settings of the engine.
        executor: Its executor.
        runner: Runs the steps of rank 0.
    """

    def __init__(self, config: QuireConfig, executor: Executor, runner: RunsSteps | None = None) -> None:
        self.own, self._executor = RankCalls(config, runner=runner), executor

    def __call__(self, method: str, arguments: Sequence[Any], named: Mapping[str, Any]) -> list[Any]:
        """What each rank returned, rank 0 first.

        Raises:
            RequestError: there is no such call, it takes other arguments, or a rank could not do it.
        """
        if not isinstance(self._executor, RankExecutor):
            return [self.own(method, arguments, named)]
        # What is wrong with a call is wrong on all ranks, which all do it: they begin and end together.
        answers = self._executor.ask("collective_rpc", method, arguments, named)
        failure: Exception | None = None
        result = None
        try:
            result = self.own(method, arguments, named)
        except Exception as error:
            failure = error
        try:
            others = answers()
        except RuntimeError as error:
            raise failure or RequestError(str(error), code="rank_failed") from None
        if failure is not None:
            raise failure
        return [result, *others]

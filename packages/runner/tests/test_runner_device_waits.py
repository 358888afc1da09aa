"""Between plain decode steps nothing waits for an accelerator, and nothing of a step is read before it is asked for.

Without an accelerator the runner works on fake tensors of device "cuda": they have shapes, dtypes and a device, but no
numbers, so that whoever wants to see a number on the host raises. A dispatch mode watches the copies besides: one that
blocks, or whose host side is not pinned, waits. With an accelerator the same steps run on it, and CUDA itself raises.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import pytest
import torch
from runner_harness import random_model
from torch import Tensor
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from quire_interfaces import NewRow, SamplingParams, SchedulerOutput
from quire_kv_cache import plan_kv_cache
from quire_ops import staging
from quire_runner import ModelRunner, RunnerConfig

BLOCK = 4
NUM_ROWS = 3
PARAMS = {
    "greedy": SamplingParams(temperature=0.0),
    "drawn": SamplingParams(temperature=0.7),
    "among the top": SamplingParams(temperature=1.1, top_k=8, top_p=0.9),
    "log probabilities": SamplingParams(temperature=0.7, logprobs=3),
}


class NoWaiting(TorchDispatchMode):
    """Raises where a copy between host and device would make one wait for the other."""

    def __init__(self) -> None:
        super().__init__()
        self.pinned: set[int] = set()
        self.num_copies = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        given = dict(zip((each.name for each in func._schema.arguments), args, strict=False)) | (kwargs or {})
        if given.get("pin_memory"):
            self.pinned.add(out.untyped_storage()._cdata)
        tensors = [each for each in tree_leaves((args, kwargs, out)) if isinstance(each, Tensor)]
        on_host = [each for each in tensors if each.device.type == "cpu"]
        if on_host and len(on_host) < len(tensors) and func is not torch.ops.prim.device.default:
            self.num_copies += 1
            what = f"{func} of {[tuple(each.shape) for each in tensors]}"
            assert given.get("non_blocking"), f"{what} waits for the device"
            assert all(each.untyped_storage()._cdata in self.pinned for each in on_host), f"{what} is not pinned"
        return out


class StandInStream:
    """Of a device that is not there: nothing runs beside anything."""

    def __init__(self, device: torch.device) -> None:
        pass

    def wait_stream(self, stream: StandInStream) -> None:
        pass

    def record_event(self) -> StandInStream:
        return self

    def synchronize(self) -> None:
        pass


@pytest.fixture(autouse=True)
def _streams(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    if not torch.cuda.is_available():
        monkeypatch.setattr(torch.cuda, "Stream", StandInStream)
        monkeypatch.setattr(torch.cuda, "current_stream", StandInStream)
        monkeypatch.setattr(torch.cuda, "stream", nullcontext)
    yield
    staging._copy_stream.cache_clear()


@contextmanager
def no_waiting() -> Iterator[None]:
    if not torch.cuda.is_available():
        with NoWaiting() as watched:
            yield
        assert watched.num_copies > 0
        return
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@contextmanager
def make_runner() -> Iterator[ModelRunner]:
    with ExitStack() as stack:
        if not torch.cuda.is_available():
            stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        model = random_model("qwen3", device="cuda")
        plan = plan_kv_cache(model.config.kv_cache_specs(BLOCK, "float32"), num_blocks=64)
        config = RunnerConfig(device="cuda", dtype="float32", max_num_seqs=NUM_ROWS, max_model_len=64)
        yield ModelRunner.for_model(model, plan, config)


def step(step_id: int, starts: list[int], counts: list[int], **more: Any) -> SchedulerOutput:
    rows = list(range(NUM_ROWS))
    return SchedulerOutput(
        step_id=step_id,
        rows=rows,
        request_ids=[str(row) for row in rows],
        num_computed_tokens=starts,
        num_scheduled_tokens=counts,
        samples=[True] * NUM_ROWS,
        total_num_scheduled_tokens=sum(counts),
        **more,
    )


def prefill(params: SamplingParams) -> SchedulerOutput:
    new = [
        NewRow(
            row=row,
            request_id=str(row),
            token_ids=[5, 6, 7, *range(row)],
            num_prompt_tokens=3 + row,
            num_computed_tokens=0,
            block_ids=([1 + 2 * row, 2 + 2 * row],),
            sampling_params=params,
            seed=row,
            stop_token_ids=frozenset(),
        )
        for row in range(NUM_ROWS)
    ]
    return step(0, [0] * NUM_ROWS, [3 + row for row in range(NUM_ROWS)], new_rows=new)


@pytest.mark.parametrize("kind", PARAMS)
def test_decode_steps_are_launched_without_waiting(kind: str) -> None:
    with make_runner() as runner:
        reads = [runner.launch(prefill(PARAMS[kind]))]
        with no_waiting():
            for step_id in range(1, 8):
                more = {"new_block_ids": {row: ([20 + row],) for row in range(NUM_ROWS)}} if step_id == 3 else {}
                reads.append(
                    runner.launch(step(step_id, [2 + row + step_id for row in range(NUM_ROWS)], [1] * 3, **more))
                )
        if torch.cuda.is_available():
            results = [read() for read in reads]
            assert all(len(tokens) == 1 for result in results for tokens in result.sampled_token_ids)
        else:
            with pytest.raises(DataDependentOutputException):  # the proof that fake tensors cannot be read
                reads[-1]()

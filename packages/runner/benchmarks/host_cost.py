"""Host cost of a decode step: everything the runner does except the network, at 1, 32 and 256 rows.

    python packages/runner/benchmarks/host_cost.py [--steps 300] [--greedy] [--vocab-size 1000]

The network is replaced by one that returns ready-made hidden states and logits, so what is measured is preparation,
sampling over a small vocabulary, and post-processing. Prints, in milliseconds, median and 99th percentile
of wall time, and the median of the thread's own processor time, which says the same on a busy machine.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time

import torch

from quire_attention.batch import ForwardBatch
from quire_interfaces import FullAttentionSpec, KVCacheGroup, KVCachePlan, NewRow, SamplingParams, SchedulerOutput
from quire_ops import DecodeRows, LoraTokens
from quire_runner import ModelRunner, RunnerConfig

BLOCK_SIZE = 16
PROMPT_LEN = 33


class NoNetwork:
    """Returns the same hidden states and logits at once."""

    dtype = torch.float32

    def __init__(self, max_rows: int, vocab_size: int) -> None:
        self._hidden = torch.zeros(max_rows * PROMPT_LEN, 8)
        self._logits = torch.randn(max_rows, vocab_size)
        self.seconds = 0.0
        self.cpu_seconds = 0.0

    def forward(self, batch: ForwardBatch) -> torch.Tensor:
        return self._hidden[: len(batch.input_ids)]

    def compute_logits(self, hidden: torch.Tensor, lora: LoraTokens | None = None) -> torch.Tensor:
        begin, cpu_begin = time.perf_counter(), time.thread_time()
        logits = self._logits[: len(hidden)].clone()
        self.seconds += time.perf_counter() - begin
        self.cpu_seconds += time.thread_time() - cpu_begin
        return logits

    def bind_decode(self, rows: DecodeRows) -> None:
        return None

    def argmax(self, hidden: torch.Tensor, lora: LoraTokens | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        begin, cpu_begin = time.perf_counter(), time.thread_time()
        max_logits, token_ids = self._logits[: len(hidden)].max(dim=-1)
        self.seconds += time.perf_counter() - begin
        self.cpu_seconds += time.thread_time() - cpu_begin
        return token_ids, max_logits


def decode(step_id: int, num_rows: int, position: int) -> SchedulerOutput:
    """Every row computes one token; every 16th step each row gets a block, as in a real run a few rows per step."""
    rows = list(range(num_rows))
    blocks_from = 1 + 64 * num_rows
    growing = [row for row in rows if (position + row) % BLOCK_SIZE == 0]
    return SchedulerOutput(
        step_id=step_id,
        rows=rows,
        request_ids=[f"request-{row}" for row in rows],
        num_computed_tokens=[position] * num_rows,
        num_scheduled_tokens=[1] * num_rows,
        samples=[True] * num_rows,
        total_num_scheduled_tokens=num_rows,
        new_block_ids={row: ([blocks_from + step_id],) for row in growing},
    )


def prefill(num_rows: int, params: SamplingParams) -> SchedulerOutput:
    rows = list(range(num_rows))
    return SchedulerOutput(
        step_id=0,
        rows=rows,
        request_ids=[f"request-{row}" for row in rows],
        num_computed_tokens=[0] * num_rows,
        num_scheduled_tokens=[PROMPT_LEN] * num_rows,
        samples=[True] * num_rows,
        total_num_scheduled_tokens=PROMPT_LEN * num_rows,
        new_rows=[
            NewRow(
                row=row,
                request_id=f"request-{row}",
                token_ids=list(range(PROMPT_LEN)),
                num_prompt_tokens=PROMPT_LEN,
                num_computed_tokens=0,
                block_ids=(list(range(1 + 64 * row, 1 + 64 * row + 64)),),
                sampling_params=params,
                seed=row,
            )
            for row in rows
        ],
    )


def measure(num_rows: int, num_steps: int, vocab_size: int, params: SamplingParams) -> list[tuple[float, float]]:
    """(wall, processor) seconds of each decode step, network excluded."""
    spec = FullAttentionSpec(block_size=BLOCK_SIZE, num_kv_heads=1, head_dim=1, dtype="float32")
    group = KVCacheGroup(spec=spec, layer_names=("layer",))
    plan = KVCachePlan(
        groups=(group,), num_blocks=64 * num_rows + num_steps + 99, tensor_block_bytes=(spec.block_bytes,)
    )
    network = NoNetwork(num_rows, vocab_size)
    runner = ModelRunner(
        network,
        plan,
        RunnerConfig(max_num_seqs=num_rows, max_model_len=4096, num_threads=1),
        vocab_size=vocab_size,
        cache_shape=lambda n, size, heads, dim: (n, 2, heads, size, dim),
    )
    runner.run(prefill(num_rows, params))
    steps = [decode(i + 1, num_rows, PROMPT_LEN + i) for i in range(num_steps)]
    times = []
    for step in steps:
        network.seconds = network.cpu_seconds = 0.0
        begin, cpu_begin = time.perf_counter(), time.thread_time()
        runner.run(step)
        wall, cpu = time.perf_counter() - begin, time.thread_time() - cpu_begin
        times.append((wall - network.seconds, cpu - network.cpu_seconds))
    runner.close()
    return times[num_steps // 10 :]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300, help="decode steps per batch size (at most 1000)")
    parser.add_argument("--vocab-size", type=int, default=1000)
    parser.add_argument("--greedy", action="store_true", help="greedy rows instead of sampled ones")
    args = parser.parse_args()
    params = SamplingParams(temperature=0 if args.greedy else 1)
    gc.disable()
    print(f"{'rows':>5} {'median ms':>10} {'p99 ms':>10} {'cpu ms':>10}")
    for num_rows in (1, 32, 256):
        times = measure(num_rows, min(args.steps, 1000), args.vocab_size, params)
        walls, cpus = sorted(wall for wall, _ in times), [cpu for _, cpu in times]
        p99 = walls[int(len(walls) * 0.99)]
        figures = (statistics.median(walls), p99, statistics.median(cpus))
        print(f"{num_rows:>5} " + " ".join(f"{seconds * 1e3:>10.3f}" for seconds in figures))


if __name__ == "__main__":
    main()
